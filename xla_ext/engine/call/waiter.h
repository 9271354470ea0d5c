// Waiter: makes a thread wait for links. The thread spins, yields now and then, and
// finally sleeps on file descriptors.
//
// A waiting rank must not take the core from the rank that it waits for, so spinning
// ends after microseconds. A waiting rank must also notice an abort, Ctrl-C and a
// deadline, so it sleeps in short slices. The caller itself checks for progress. It
// then calls Progressed if there was progress, and Idle if there was none.
#pragma once

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <vector>

#include "base/status.h"
#include "transport/doorbell.h"
#include "transport/link.h"

namespace ringjax {

using Clock = std::chrono::steady_clock;

inline Clock::duration ToDuration(double seconds) {
  return std::chrono::duration_cast<Clock::duration>(
      std::chrono::duration<double>(seconds));
}

// A function that returns whether the user has interrupted this process (Ctrl-C).
using InterruptCheck = bool (*)();
// The InterruptCheck of this process, or null if there is none.
inline std::atomic<InterruptCheck> interrupt_check{nullptr};
// Runs interrupt_check, which may run Python's signal handlers. Must be called without
// any lock.
inline bool Interrupted() {
  const InterruptCheck check = interrupt_check.load();
  return check != nullptr && check();
}

// While an InterruptsAfter exists, the waits of its thread can be interrupted only
// after `seconds` without progress. An earlier interrupt stays pending, and the caller
// handles it after the wait.
class InterruptsAfter {
 public:
  explicit InterruptsAfter(double seconds) { allowed_after = seconds; }
  ~InterruptsAfter() { allowed_after = 0; }
  InterruptsAfter(const InterruptsAfter&) = delete;
  InterruptsAfter& operator=(const InterruptsAfter&) = delete;
  static bool Allows(double idle) { return idle >= allowed_after; }

 private:
  static inline thread_local double allowed_after = 0;
};

// Makes one thread wait. Not thread-safe. Must not outlive `doorbell` and `aborted`.
class Waiter {
 public:
  // A link or a shared segment to arm before sleeping, and the directions in which the
  // caller wants to move bytes.
  struct Interest {
    Waitable* link;
    bool read, write;
  };

  Waiter(Doorbell* doorbell, const std::atomic<bool>* aborted, double spin_seconds,
         bool oversubscribed)
      : doorbell_(doorbell),
        aborted_(aborted),
        spin_(ToDuration(spin_seconds)),
        oversubscribed_(oversubscribed) {}

  // Whether this host has more ranks than cores.
  bool oversubscribed() const { return oversubscribed_; }

  // Records that the caller has moved data, so that the next wait spins again. If the
  // waits of a thread are long, spinning only takes the core from other threads. So a
  // wait longer than three times spin_ halves the spin time of the next wait (at most
  // five times in all), and a shorter wait doubles the spin time again.
  void Progressed() {
    if (idle_ > kUncounted && !OnlyPauses()) {
      const bool brief = Clock::now() - since_ < 3 * spin_;
      spin_shift_ = brief ? std::max(spin_shift_ - 1, 0) : std::min(spin_shift_ + 1, 5);
    }
    idle_ = 0;
  }

  bool aborted() const { return aborted_->load(std::memory_order_acquire); }

  // Sets the longest sleep before the caller checks for progress again (<= kLongestMs).
  void set_slice(Clock::duration slice) {
    const auto ms = std::chrono::ceil<std::chrono::milliseconds>(slice).count();
    slice_ms_ = static_cast<int>(std::clamp<int64_t>(ms, 0, kLongestMs));
  }

  // Returns the seconds that the present wait has lasted, or 0 if the caller has found
  // progress. The time in which Idle only pauses does not count: it is a microsecond,
  // and reading the clock takes longer than a pause.
  double IdleSeconds() const {
    if (idle_ == 0 || OnlyPauses()) return 0;
    return std::chrono::duration<double>(Clock::now() - since_).count();
  }

  // Waits a little after the caller has found no progress, and returns when the caller
  // should check again. Calls `interests()` only before a sleep. Fails with
  // kUnavailable once the communicator is aborted, and with kCancelled after an
  // interrupt.
  template <typename Interests>
  Status Idle(Interests&& interests) {
    if (aborted()) return Status(Code::kUnavailable, "aborted");
    ++idle_;
    if (OnlyPauses()) {
      Pause();
      return OkStatus();
    }
    const auto now = Clock::now();
    if (idle_ == (oversubscribed_ ? 1 : kPauses + 1)) {
      since_ = now;
      if (!oversubscribed_) doorbell_->placement().Check();
    }
    if (now - since_ < spin_ / (1 << spin_shift_)) {
      if (oversubscribed_ || idle_ % 16 == 0)
        sched_yield();
      else
        Pause();
      return OkStatus();
    }
    return Sleep(interests());
  }

 private:
  // Whether Idle only pauses. On an oversubscribed host, Idle always yields or sleeps,
  // because the late rank may be waiting for this core.
  bool OnlyPauses() const { return idle_ <= kPauses && !oversubscribed_; }
  static void Pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

  Status Sleep(const std::vector<Interest>& interests) {
    fds_.clear();
    bool ready = false;
    for (const Interest& i : interests) ready |= i.link->Arm(i.read, i.write, &fds_);
    // If the communicator was aborted after the check in Idle, the abort has rung the
    // doorbell, so Sleep returns immediately.
    if (!ready) doorbell_->Sleep(&fds_, slice_ms_);
    for (const Interest& i : interests) i.link->Disarm();
    InterruptCheck check = interrupt_check.load();
    if (check != nullptr && InterruptsAfter::Allows(IdleSeconds()) && check())
      return Status(Code::kCancelled, "interrupted");
    return OkStatus();
  }

  static constexpr int kLongestMs = 1000;
  // The calls of Idle in each wait that only pause, without reading the clock.
  static constexpr uint64_t kPauses = 32;
  // Waits of so few calls of Idle do not change the spin time.
  static constexpr uint64_t kUncounted = 8;

  Doorbell* doorbell_;
  const std::atomic<bool>* aborted_;
  Clock::duration spin_;
  bool oversubscribed_;
  uint64_t idle_ = 0;        // calls of Idle since the last progress
  Clock::time_point since_;  // the first of these calls that did more than pause
  int spin_shift_ = 0;       // how often the spin time is halved
  int slice_ms_ = 100;
  std::vector<pollfd> fds_;
};

}  // namespace ringjax
