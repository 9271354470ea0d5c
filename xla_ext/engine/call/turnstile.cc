// See turnstile.h.
#include "engine/call/turnstile.h"

namespace ringjax {

uint64_t Turnstile::Take() {
  std::lock_guard lock(mutex_);
  return next_++;
}

Status Turnstile::Wait(uint64_t ticket, const std::function<Status()>& stop) {
  std::unique_lock lock(mutex_);
  while (serving_ != ticket) {
    // Asked before waiting: behind a turn that was lost nobody will call.
    const uint64_t woken = woken_;
    lock.unlock();
    RJ_TRY(stop());
    lock.lock();
    // Woken after it was asked: to be asked again.
    if (serving_ == ticket || woken_ != woken) continue;
    turn_.wait_for(lock, slice_);
  }
  return OkStatus();
}

void Turnstile::Leave() {
  {
    std::lock_guard lock(mutex_);
    ++serving_;
  }
  turn_.notify_all();
}

void Turnstile::WakeAll() {
  {
    std::lock_guard lock(mutex_);
    ++woken_;
  }
  turn_.notify_all();
}

}  // namespace ringjax
