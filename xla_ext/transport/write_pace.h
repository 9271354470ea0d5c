// How a writer copies to memory that another core reads: with ordinary stores, or past
// the caches.
//
// An ordinary store first fetches the line from whichever core had it last. Where cores
// share a cache this is quicker than memory, for who writes and for who reads. Where
// they do not (another socket, another part of the chip, or a virtual machine whose
// cores have been moved), the writer waits for every line: it takes ten times as long,
// and the whole collective three to seven times. Nobody tells a process which it is,
// and a machine that is shared changes its mind. But it shows in nothing more than the
// time that the writer's own copy takes, so each looks at its clock. The bytes are the
// same.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "transport/copy.h"

namespace ringjax {

// Whether all copies of WritePace::kLeast bytes and more go past the caches, whatever
// the clock says. Only tests change it.
inline std::atomic<bool> always_past{false};

// Of one writer; not for several threads at a time.
class WritePace {
 public:
  static constexpr size_t kLeast = 4 << 10;  // shorter ones are copied as always

  void Copy(void* to, const void* from, size_t bytes) {
    if (bytes < kLeast)
      CopyBytes(to, from, bytes);
    else
      CopyLong(to, from, bytes);
  }

  // Whether the last long copy did go past the caches.
  bool went_past() const { return past_; }

  // Whether the next copy of so many bytes goes past the caches.
  bool Past(size_t bytes) const { return states_[Kind(bytes)].past; }
  // It has taken so long.
  void Took(size_t bytes, double seconds);

 private:
  static constexpr int kTurns = 3;  // of which the median counts
  static constexpr uint16_t kFirstPause = 32, kLongestPause = 512, kLeastPause = 8;
  // Past the caches is quicker for the writer anywhere, but not for who reads; so
  // ordinary stores must take this many times as long. On two cores of an EPYC they
  // took 0.5 to 3 times as long where they were right, and 6 to 14 where they were not.
  static constexpr double kFar = 4;
  static constexpr double kWorse = 2;  // of the time before: a reason to try

  // Of copies that are alike enough to be compared: a power of 2 of bytes.
  struct State {
    // Seconds a byte, of ordinary copies and past the caches.
    std::array<std::array<float, kTurns>, 2> paces = {};
    std::array<uint16_t, 2> turns = {};
    uint16_t trial = 0;            // copies that are left of one
    uint16_t wait = kTurns;        // copies until the next one
    uint16_t pause = kFirstPause;  // before the one after it
    bool past = false;
    float settled = 0;  // the pace when it was decided last

    float Median(bool which) const;
    void Decide();
  };

  static size_t Kind(size_t bytes);
  void CopyLong(void* to, const void* from, size_t bytes);

  std::array<State, 9> states_;  // 4 KiB to 1 MiB and more
  bool past_ = false;
};

}  // namespace ringjax
