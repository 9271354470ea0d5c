// Whether long sums go through a board or are lent: what was quicker lately.
//
// Where a line that one core has written soon reaches another, a board takes two thirds
// of the time; where it does not, because the cores belong to different sockets, say,
// loans take a third. Nobody tells a process which it is, and a machine that is shared
// changes its mind. So rank 0 looks at its clock, tries the other way now and then,
// five messages in a row, and says what all shall do. The bits do not depend on it.
// And a rank that only sends asks by itself whether to copy into a ring or to lend.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>

#include "base/status.h"

namespace ringjax {

class LoanPace {
 public:
  static constexpr uint64_t kLeast = 512 << 10;  // bytes of a long message

  // What is alike enough to be compared: allreduces or reducescatters of a power of 2
  // of bytes. A bit of `wish`.
  static int Kind(bool scatters, uint64_t bytes);

  // Of each kind, whether the next message shall be lent.
  uint32_t wish() const { return wish_; }

  // Sends a message by run(lends), the way that was quicker for such ones.
  template <typename Run>
  Status Time(uint64_t bytes, Run&& run) {
    if (bytes < kSeen) return run(false);
    const int kind = Kind(false, bytes);
    const bool lends = wish_ >> kind & 1;
    const auto began = std::chrono::steady_clock::now();
    RJ_TRY(run(lends));
    const std::chrono::duration<double> passed =
        std::chrono::steady_clock::now() - began;
    Took(kind, lends, bytes, passed.count());
    return OkStatus();
  }

  // A message has taken so long, lent or not.
  void Took(int kind, bool lent, uint64_t bytes, double seconds);

 private:
  // So much longer than a ring that who sends sees how long the other takes.
  static constexpr uint64_t kSeen = 4 << 20;
  static constexpr int kTurns = 3;  // of which the median counts
  // Of a trial, so many before them do not: caches are as the other way has left them.
  static constexpr int kWarm = 2;

  struct State {
    // Seconds a byte, not lent and lent.
    std::array<std::array<double, kTurns>, 2> paces = {};
    std::array<uint32_t, 2> turns = {};
    uint32_t trial = 0;            // messages that are left of one
    uint32_t wait = kTurns;        // messages until the next one
    uint32_t pause = kFirstPause;  // before the one after it
    double settled = 0;            // the pace when it was decided last
  };

  static constexpr uint32_t kFirstPause = 32;
  // Lent, nothing tells that the board would be quicker again.
  static constexpr uint32_t kLongestPause[2] = {1024, 512};
  static constexpr double kBetter = 0.85;  // of the time, or it stays as it is
  static constexpr double kWorse = 1.5;    // of the time before: a reason to try
  static constexpr uint32_t kLeastPause = 8;

  static double Median(const State& state, bool lent);
  void Begin(int kind, State* state);
  void Decide(int kind, State* state);

  std::array<State, 32> states_;
  uint32_t wish_ = 0;
};

}  // namespace ringjax
