// Each State chooses the kind of stores for its own lengths. After `wait` copies, or
// earlier if copies have become slow (kEarlyTrialRatio), a trial makes kTrialCopies
// copies with the other kind. Then Decide compares the median times of both kinds,
// chooses one kind, and sets the pause before the next trial.
#include "transport/adaptive_copier.h"

#include <bit>
#include <chrono>
#include <cstring>

namespace ringjax {

size_t AdaptiveCopier::StateIndex(size_t bytes) {
  const int above =
      std::bit_width(std::max(bytes, kMinBytes)) - std::bit_width(kMinBytes);
  return std::min(static_cast<size_t>(above), decltype(states_)().size() - 1);
}

bool AdaptiveCopier::IsMeasured(size_t bytes) {
  State& state = states_[StateIndex(bytes)];
  if (bytes >= kShortBytes || state.trial > 0) return true;
  return ++state.unmeasured % kShortPeriod == 0;
}

// Ordinary copies use memcpy and not CopyBytes. A line that is in another core's own
// cache, such as a line of an inline slot, takes a tenth less time with the C library's
// string instruction than with vector stores. A line in a shared cache takes the same
// time with both.
void AdaptiveCopier::CopyLong(void* to, const void* from, size_t bytes) {
  using Clock = std::chrono::steady_clock;
  non_temporal_ =
      IsNonTemporal(bytes) || always_non_temporal.load(std::memory_order_relaxed);
  const bool measured = IsMeasured(bytes);
  const auto began = measured ? Clock::now() : Clock::time_point();
  if (non_temporal_)
    CopyNonTemporal(to, from, bytes);
  else
    std::memcpy(to, from, bytes);
  if (!measured) return;
  const std::chrono::duration<double> passed = Clock::now() - began;
  Record(bytes, passed.count());
}

void AdaptiveCopier::Record(size_t bytes, double seconds) {
  State& state = states_[StateIndex(bytes)];
  state.seconds_per_byte[state.non_temporal]
                        [state.copies[state.non_temporal]++ % kTrialCopies] =
      static_cast<float>(seconds / static_cast<double>(bytes));
  if (state.trial > 0) {
    if (--state.trial == 0) state.Decide();
    return;
  }
  if (state.wait > 0) --state.wait;
  const bool worse =
      state.settled > 0 && state.wait + kMinPause <= state.pause &&
      state.Median(state.non_temporal) > kEarlyTrialRatio * state.settled;
  if (state.wait > 0 && !worse) return;
  state.non_temporal = !state.non_temporal;
  state.trial = kTrialCopies;
}

float AdaptiveCopier::State::Median(bool which) const {
  auto sorted = seconds_per_byte[which];
  std::sort(sorted.begin(), sorted.end());
  return sorted[kTrialCopies / 2];
}

void AdaptiveCopier::State::Decide() {
  const bool distant = Median(false) > kNonTemporalRatio * Median(true),
             changes = distant == non_temporal;
  pause = changes ? kFirstPause : std::min<uint16_t>(2 * pause, kMaxPause);
  non_temporal = distant;
  wait = pause;
  settled = Median(non_temporal);
}

}  // namespace ringjax
