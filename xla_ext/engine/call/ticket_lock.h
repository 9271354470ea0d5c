// TicketLock: serves callers in the order in which they took tickets.
//
// Mellor-Crummey and Scott, "Algorithms for scalable synchronization on shared-memory
// multiprocessors", ACM TOCS 9(1), 1991. Unlike in that lock, a waiting caller sleeps
// on a condition variable and does not spin, because a call may last for seconds.
// Without contention, a caller only locks a mutex.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>

#include "base/status.h"

namespace ringjax {

// All functions may be called by any thread.
class TicketLock {
 public:
  // `slice` is the longest sleep before Wait calls `stop` again. Only Ctrl-C needs this
  // limit, because no thread calls WakeAll after Ctrl-C, as one does for all other
  // reasons to stop.
  explicit TicketLock(std::chrono::milliseconds slice = std::chrono::milliseconds(100))
      : slice_(slice) {}

  // Takes the next ticket. Later tickets are not served until the caller has called
  // Wait and Leave.
  uint64_t Take() { return next_.fetch_add(1); }
  // Waits until the ticket is served. Calls `stop` before each sleep, without holding
  // the mutex. If `stop` fails, returns the error of `stop`. The ticket is then lost,
  // and later tickets are never served.
  Status Wait(uint64_t ticket, const std::function<Status()>& stop);
  void Leave();    // serves the next ticket
  void WakeAll();  // makes all waiting callers call `stop` again

 private:
  const std::chrono::milliseconds slice_;
  std::mutex mutex_;
  std::condition_variable served_;
  uint64_t woken_ = 0;
  std::atomic<uint64_t> next_{0};
  // Only written with mutex_ held. Wait reads it first without the mutex.
  std::atomic<uint64_t> serving_{0};
};

// Calls Leave at the end of a scope, even if an exception ends the scope.
class TicketLockGuard {
 public:
  explicit TicketLockGuard(TicketLock* lock) : lock_(lock) {}
  ~TicketLockGuard() { lock_->Leave(); }
  TicketLockGuard(const TicketLockGuard&) = delete;
  TicketLockGuard& operator=(const TicketLockGuard&) = delete;

 private:
  TicketLock* lock_;
};

}  // namespace ringjax
