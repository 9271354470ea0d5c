// See write_pace.h.
#include "transport/write_pace.h"

#include <bit>
#include <chrono>
#include <cstring>

namespace ringjax {

size_t WritePace::Kind(size_t bytes) {
  const int above = std::bit_width(std::max(bytes, kLeast)) - std::bit_width(kLeast);
  return std::min(static_cast<size_t>(above), decltype(states_)().size() - 1);
}

// What lies in another core's own cache, as a note does, takes a tenth less with the C
// library's string instruction than with vector stores; what both share, as long.
void WritePace::CopyLong(void* to, const void* from, size_t bytes) {
  using Clock = std::chrono::steady_clock;
  past_ = Past(bytes) || always_past.load(std::memory_order_relaxed);
  const auto began = Clock::now();
  if (past_)
    CopyPast(to, from, bytes);
  else
    std::memcpy(to, from, bytes);
  const std::chrono::duration<double> passed = Clock::now() - began;
  Took(bytes, passed.count());
}

void WritePace::Took(size_t bytes, double seconds) {
  State& state = states_[Kind(bytes)];
  state.paces[state.past][state.turns[state.past]++ % kTurns] =
      static_cast<float>(seconds / static_cast<double>(bytes));
  if (state.trial > 0) {
    if (--state.trial == 0) state.Decide();
    return;
  }
  if (state.wait > 0) --state.wait;
  const bool worse = state.settled > 0 && state.wait + kLeastPause <= state.pause &&
                     state.Median(state.past) > kWorse * state.settled;
  if (state.wait > 0 && !worse) return;
  state.past = !state.past;
  state.trial = kTurns;
}

float WritePace::State::Median(bool which) const {
  auto sorted = paces[which];
  std::sort(sorted.begin(), sorted.end());
  return sorted[kTurns / 2];
}

void WritePace::State::Decide() {
  const bool far = Median(false) > kFar * Median(true), changes = far == past;
  pause = changes ? kFirstPause : std::min<uint16_t>(2 * pause, kLongestPause);
  past = far;
  wait = pause;
  settled = Median(past);
}

}  // namespace ringjax
