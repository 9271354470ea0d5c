// Copies into memory that another core reads, with ordinary or non-temporal stores.
//
// An ordinary store first fetches the cache line from the core that had it last. If the
// two cores share a cache, the line stays in that cache, which is faster than memory
// for the writer and for the reader. If they share none (another socket, another part
// of the chip, or a virtual machine whose cores were moved), the writer waits for every
// line: the copy takes ten times as long, and the whole collective three to seven
// times. The system does not report which case applies, and on a shared machine the
// case changes. The duration of the writer's copies shows it best, so each writer
// measures its own copies. The bytes are the same with either kind of store.
//
// Non-temporal stores: Intel 64 and IA-32 Architectures Optimization Reference Manual,
// chapter "Optimizing Cache Usage".
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "transport/copy.h"

namespace ringjax {

// Whether all copies of AdaptiveCopier::kMinBytes bytes and more are non-temporal,
// regardless of the measurements. Only tests set the flag.
inline std::atomic<bool> always_non_temporal{false};

// Makes the copies of one writer and chooses the kind of stores for them. One thread
// uses an AdaptiveCopier at a time.
class AdaptiveCopier {
 public:
  static constexpr size_t kMinBytes = 4 << 10;  // shorter copies use ordinary stores

  void Copy(void* to, const void* from, size_t bytes) {
    if (bytes < kMinBytes)
      CopyBytes(to, from, bytes);
    else
      CopyLong(to, from, bytes);
  }

  // Whether the last long copy was non-temporal.
  bool non_temporal() const { return non_temporal_; }

  // Returns whether the next copy of `bytes` >= kMinBytes bytes will use non-temporal
  // stores, according to the measurements. Ignores always_non_temporal.
  bool IsNonTemporal(size_t bytes) const {
    return states_[StateIndex(bytes)].non_temporal;
  }
  // Records that a copy of `bytes` bytes, of the kind that IsNonTemporal returned, took
  // `seconds`, and chooses the kind of the next copies.
  void Record(size_t bytes, double seconds);

 private:
  static constexpr int kTrialCopies = 3;  // copies of a trial; their median time counts
  // A copy of fewer bytes takes about as long as a measurement. So between trials only
  // each kShortPeriod-th of these copies is measured.
  static constexpr size_t kShortBytes = 16 << 10;
  static constexpr uint16_t kShortPeriod = 4;
  // Numbers of measured copies between two trials: kFirstPause after a trial that
  // changed the choice, then twice as many after each trial that confirms the choice,
  // up to kMaxPause. An early trial (kEarlyTrialRatio) begins after at least kMinPause
  // copies.
  static constexpr uint16_t kFirstPause = 32, kMaxPause = 512, kMinPause = 8;
  // Non-temporal stores can be faster for the writer but slower for the reader. So a
  // trial chooses them only if ordinary stores take more than kNonTemporalRatio times
  // as long. On an EPYC, ordinary stores took 0.5 to 3 times as long between cores for
  // which they were the right choice, and 6 to 14 times between other cores.
  static constexpr double kNonTemporalRatio = 4;
  // An early trial begins if a byte takes more than kEarlyTrialRatio times as long as
  // it did at the end of the last trial.
  static constexpr double kEarlyTrialRatio = 2;

  // The measurements for copies whose lengths lie between the same two powers of 2.
  struct State {
    // Seconds per byte of the last kTrialCopies ordinary [0] and non-temporal [1]
    // copies.
    std::array<std::array<float, kTrialCopies>, 2> seconds_per_byte = {};
    std::array<uint16_t, 2> copies = {};  // copies of each kind so far
    uint16_t unmeasured = 0;              // short copies since the last measurement
    uint16_t trial = 0;                   // copies left in the present trial
    uint16_t wait = kTrialCopies;         // copies until the next trial
    uint16_t pause = kFirstPause;         // the value of `wait` after the last trial
    bool non_temporal = false;
    float settled = 0;  // seconds per byte when a trial last ended; 0 before the first

    float Median(bool which) const;
    void Decide();
  };

  static size_t StateIndex(size_t bytes);
  bool IsMeasured(size_t bytes);  // whether to measure the next copy of `bytes` bytes
  void CopyLong(void* to, const void* from, size_t bytes);

  std::array<State, 9> states_;  // states for 4 KiB, 8 KiB, ..., 1 MiB and more
  bool non_temporal_ = false;
};

}  // namespace ringjax
