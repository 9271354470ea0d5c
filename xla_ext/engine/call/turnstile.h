// Whose turn it is: first come, first served, over a condition variable. The fast path
// takes one lock.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>

#include "base/status.h"

namespace ringjax {

class Turnstile {
 public:
  // `slice`: so long a wait lasts at most until `stop` is asked again, since nobody
  // wakes it for Ctrl-C. For all else there is somebody.
  explicit Turnstile(std::chrono::milliseconds slice = std::chrono::milliseconds(100))
      : slice_(slice) {}

  uint64_t Take();
  // Not ok if `stop` says so while waiting; the turn is then lost for good.
  Status Wait(uint64_t ticket, const std::function<Status()>& stop);
  void Leave();    // after one's turn
  void WakeAll();  // after a change of what `stop` says

 private:
  const std::chrono::milliseconds slice_;
  std::mutex mutex_;
  std::condition_variable turn_;
  uint64_t next_ = 0, serving_ = 0, woken_ = 0;
};

// Leaves the turnstile whatever happens: a turn that is kept would stop all others.
class Turn {
 public:
  explicit Turn(Turnstile* turnstile) : turnstile_(turnstile) {}
  ~Turn() { turnstile_->Leave(); }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

 private:
  Turnstile* turnstile_;
};

}  // namespace ringjax
