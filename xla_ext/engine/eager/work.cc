// Implements waiting for a Work, by a thread and by a device stream. See work.h.
#include "engine/eager/work.h"

#include <sched.h>

#include <chrono>

#include "engine/call/waiter.h"

namespace ringjax {

Status Work::Wait() {
  constexpr auto kSlice = std::chrono::milliseconds(100);
  if (done()) return status_;
  if (gate_->IsDriver())
    return Status(Code::kFailedPrecondition,
                  "a signal handler waits for an operation that its own thread must do "
                  "after it; submit it there, and wait for it later");
  // Yield before sleeping, because a sleep and a wake-up take longer than most short
  // operations.
  const auto until = Clock::now() + std::chrono::duration<double>(gate_->spin_seconds);
  while (!done() && Clock::now() < until) sched_yield();
  while (!done()) {
    {
      std::unique_lock lock(gate_->mutex);
      gate_->ended.wait_for(lock, kSlice, [this] { return done(); });
    }
    if (done()) break;
    if (Interrupted()) return Status(Code::kCancelled, "interrupted while waiting");
  }
  return status_;
}

Status Work::Follow(uint64_t stream) {
  if (!status_.ok() || !end_) return status_;
  RJ_TRY(end_->Delay(stream));
  if (stream == stream_) followed_.store(true, std::memory_order_release);
  return OkStatus();
}

}  // namespace ringjax
