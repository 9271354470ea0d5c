// How a thread waits for links: spin briefly, then yield, then sleep on descriptors.
//
// A waiting rank must not take the core from the rank it waits for, so spinning ends
// after microseconds; and it must notice an abort, Ctrl-C and a deadline, so sleeping
// is in slices. Waiting for progress and deciding that there was none stay with the
// caller.
#pragma once

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <vector>

#include "base/status.h"
#include "transport/link.h"

namespace ringjax {

using Clock = std::chrono::steady_clock;

// Returns true if this process was asked to stop (Ctrl-C). May be null.
using InterruptCheck = bool (*)();
inline std::atomic<InterruptCheck> interrupt_check{nullptr};

// While it lives, what this thread waits for can be interrupted only after so many
// seconds without progress: until then, whoever waits here can be told later.
class InterruptsAfter {
 public:
  explicit InterruptsAfter(double seconds) { patience = seconds; }
  ~InterruptsAfter() { patience = 0; }
  InterruptsAfter(const InterruptsAfter&) = delete;
  InterruptsAfter& operator=(const InterruptsAfter&) = delete;
  static bool Allows(double idle) { return idle >= patience; }

 private:
  static inline thread_local double patience = 0;
};

class Waiter {
 public:
  // What to arm before sleeping: a link or a board, wants to read, wants to write.
  struct Interest {
    Waitable* link;
    bool read, write;
  };

  Waiter(Doorbell* doorbell, const std::atomic<bool>* aborted, double spin_seconds,
         bool crowded)
      : doorbell_(doorbell), aborted_(aborted), crowded_(crowded) {
    spin_ = std::chrono::duration_cast<Clock::duration>(
        std::chrono::duration<double>(spin_seconds));
  }

  bool crowded() const { return crowded_; }  // more ranks on this host than cores

  // The caller moved something: the next wait starts with spinning again.
  // Where waits last, spinning only takes the core from others, so it gets shorter with
  // every long wait, and longer again where it would have been enough.
  void Progressed() {
    if (idle_ > kFree) {
      const bool brief = Clock::now() - since_ < 3 * spin_;
      patience_ = brief ? std::max(patience_ - 1, 0) : std::min(patience_ + 1, 5);
    }
    idle_ = 0;
  }

  bool aborted() const { return aborted_->load(std::memory_order_acquire); }

  // The longest sleep until the caller looks again.
  void set_slice(Clock::duration slice) {
    const auto ms = std::chrono::ceil<std::chrono::milliseconds>(slice).count();
    slice_ms_ = static_cast<int>(std::clamp<int64_t>(ms, 0, kLongestMs));
  }

  // How long there has been no progress; zero while spinning.
  double IdleSeconds() const {
    if (idle_ == 0) return 0;
    return std::chrono::duration<double>(Clock::now() - since_).count();
  }

  // The caller found nothing to do. Returns when it should look again; not ok once the
  // communicator is aborted or this process was interrupted.
  template <typename Interests>
  Status Idle(Interests&& interests) {
    if (aborted()) return Status(Code::kUnavailable, "aborted");
    if (idle_ == 0) since_ = Clock::now();
    ++idle_;
    if (idle_ <= kFree && !crowded_) {
      Pause();
      return OkStatus();
    }
    if (Clock::now() - since_ < spin_ / (1 << patience_)) {
      // Crowded: somebody who could make progress may be waiting for this core.
      if (crowded_ || idle_ % 16 == 0)
        sched_yield();
      else
        Pause();
      return OkStatus();
    }
    return Sleep(interests());
  }

 private:
  static void Pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

  Status Sleep(const std::vector<Interest>& interests) {
    fds_.clear();
    fds_.push_back({doorbell_->fd(), POLLIN, 0});
    bool ready = false;
    for (const Interest& i : interests) ready |= i.link->Arm(i.read, i.write, &fds_);
    // An abort since Idle looked has rung the doorbell, which nobody else drains.
    if (!ready) poll(fds_.data(), fds_.size(), slice_ms_);
    for (const Interest& i : interests) i.link->Disarm();
    if (fds_[0].revents) doorbell_->Drain();
    InterruptCheck check = interrupt_check.load();
    if (check != nullptr && InterruptsAfter::Allows(IdleSeconds()) && check())
      return Status(Code::kCancelled, "interrupted");
    return OkStatus();
  }

  static constexpr int kLongestMs = 1000;
  static constexpr uint64_t kFree = 8;  // looks before the clock is asked

  Doorbell* doorbell_;
  const std::atomic<bool>* aborted_;
  Clock::duration spin_;
  bool crowded_;
  uint64_t idle_ = 0;
  Clock::time_point since_;
  int patience_ = 0;  // spins are this often halved
  int slice_ms_ = 100;
  std::vector<pollfd> fds_;
};

}  // namespace ringjax
