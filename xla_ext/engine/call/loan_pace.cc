// See loan_pace.h.
#include "engine/call/loan_pace.h"

#include <algorithm>
#include <bit>

namespace ringjax {

int LoanPace::Kind(bool scatters, uint64_t bytes) {
  const int above = std::bit_width(std::max(bytes, kLeast)) - std::bit_width(kLeast);
  return std::min(above, 15) + (scatters ? 16 : 0);
}

double LoanPace::Median(const State& state, bool lent) {
  auto paces = state.paces[lent];
  std::sort(paces.begin(), paces.end());
  return paces[kTurns / 2];
}

void LoanPace::Took(int kind, bool lent, uint64_t bytes, double seconds) {
  State& state = states_[static_cast<size_t>(kind)];
  state.paces[lent][state.turns[lent]++ % kTurns] =
      seconds / static_cast<double>(std::max<uint64_t>(bytes, 1));
  if (state.trial > 0) {
    if (--state.trial == 0) Decide(kind, &state);
    return;
  }
  if (state.wait > 0) --state.wait;
  const bool worse = state.settled > 0 && state.wait + kLeastPause <= state.pause &&
                     Median(state, lent) > kWorse * state.settled;
  if (state.wait == 0 || worse) Begin(kind, &state);
}

void LoanPace::Begin(int kind, State* state) {
  wish_ ^= 1u << kind;
  state->trial = kWarm + kTurns;
  state->turns[wish_ >> kind & 1] = 0;
}

void LoanPace::Decide(int kind, State* state) {
  const bool tried = wish_ >> kind & 1;
  // It was not done: this rank's memory cannot be lent.
  const bool could = state->turns[tried] >= kTurns;
  const bool better = could && Median(*state, tried) < kBetter * Median(*state, !tried);
  const bool lends = better ? tried : !tried;
  if (lends != tried) wish_ ^= 1u << kind;
  state->pause =
      better ? kFirstPause : std::min(2 * state->pause, kLongestPause[lends]);
  state->wait = state->pause;
  state->settled = Median(*state, lends);
}

}  // namespace ringjax
