// See adaptive_copier.h.
//
// How the kind of stores is chosen for the lengths of one State: after `wait` copies,
// or earlier if the copies have become slow (kWorse), a trial makes kTurns copies with
// the other kind. Then Decide compares the medians of both kinds, chooses one of them,
// and sets the pause before the next trial.
#include "transport/adaptive_copier.h"

#include <bit>
#include <chrono>
#include <cstring>

namespace ringjax {

size_t AdaptiveCopier::Kind(size_t bytes) {
  const int above = std::bit_width(std::max(bytes, kLeast)) - std::bit_width(kLeast);
  return std::min(static_cast<size_t>(above), decltype(states_)().size() - 1);
}

// Ordinary copies use memcpy and not CopyBytes. A line that is in another core's own
// cache, such as a line of an inline slot, takes a tenth less time with the C library's
// string instruction than with vector stores. A line in a shared cache takes the same
// time with both.
void AdaptiveCopier::CopyLong(void* to, const void* from, size_t bytes) {
  using Clock = std::chrono::steady_clock;
  non_temporal_ =
      IsNonTemporal(bytes) || always_non_temporal.load(std::memory_order_relaxed);
  const auto began = Clock::now();
  if (non_temporal_)
    CopyNonTemporal(to, from, bytes);
  else
    std::memcpy(to, from, bytes);
  const std::chrono::duration<double> passed = Clock::now() - began;
  Took(bytes, passed.count());
}

void AdaptiveCopier::Took(size_t bytes, double seconds) {
  State& state = states_[Kind(bytes)];
  state.paces[state.non_temporal][state.turns[state.non_temporal]++ % kTurns] =
      static_cast<float>(seconds / static_cast<double>(bytes));
  if (state.trial > 0) {
    if (--state.trial == 0) state.Decide();
    return;
  }
  if (state.wait > 0) --state.wait;
  const bool worse = state.settled > 0 && state.wait + kLeastPause <= state.pause &&
                     state.Median(state.non_temporal) > kWorse * state.settled;
  if (state.wait > 0 && !worse) return;
  state.non_temporal = !state.non_temporal;
  state.trial = kTurns;
}

float AdaptiveCopier::State::Median(bool which) const {
  auto sorted = paces[which];
  std::sort(sorted.begin(), sorted.end());
  return sorted[kTurns / 2];
}

void AdaptiveCopier::State::Decide() {
  const bool far = Median(false) > kFar * Median(true), changes = far == non_temporal;
  pause = changes ? kFirstPause : std::min<uint16_t>(2 * pause, kLongestPause);
  non_temporal = far;
  wait = pause;
  settled = Median(non_temporal);
}

}  // namespace ringjax
