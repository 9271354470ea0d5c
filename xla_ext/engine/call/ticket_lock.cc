// Implements TicketLock: takes tickets, waits for them and serves them. See
// ticket_lock.h.
#include "engine/call/ticket_lock.h"

namespace ringjax {

Status TicketLock::Wait(uint64_t ticket, const std::function<Status()>& stop) {
  if (serving_.load(std::memory_order_acquire) == ticket) return OkStatus();
  std::unique_lock lock(mutex_);
  while (serving_ != ticket) {
    // `stop` is called before each sleep, because an earlier ticket may never be used,
    // and then no Leave ever serves this ticket.
    const uint64_t woken = woken_;
    lock.unlock();
    RJ_TRY(stop());
    lock.lock();
    // A WakeAll while the mutex was released did not wake this thread, but `stop` may
    // return an error now. So `stop` is called again before the sleep.
    if (serving_ == ticket || woken_ != woken) continue;
    served_.wait_for(lock, slice_);
  }
  return OkStatus();
}

void TicketLock::Leave() {
  {
    std::lock_guard lock(mutex_);
    ++serving_;
  }
  served_.notify_all();
}

void TicketLock::WakeAll() {
  {
    std::lock_guard lock(mutex_);
    ++woken_;
  }
  served_.notify_all();
}

}  // namespace ringjax
