// See turnstile.h.
#include "engine/call/turnstile.h"

#include <chrono>

namespace ringjax {

uint64_t Turnstile::Take() {
  std::lock_guard lock(mutex_);
  return next_++;
}

Status Turnstile::Wait(uint64_t ticket, const std::function<Status()>& stop) {
  std::unique_lock lock(mutex_);
  while (serving_ != ticket) {
    // Asked before waiting: behind a turn that was lost nobody will call.
    lock.unlock();
    RJ_TRY(stop());
    lock.lock();
    if (serving_ == ticket) break;
    turn_.wait_for(lock, std::chrono::milliseconds(100));
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

void Turnstile::WakeAll() { turn_.notify_all(); }

}  // namespace ringjax
