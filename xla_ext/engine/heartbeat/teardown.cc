// The teardown barrier over the sockets of the heartbeat. See teardown_barrier.h.
#include <algorithm>
#include <cstring>

#include "engine/heartbeat/heartbeat.h"

namespace ringjax {

void Heartbeat::AnnounceTeardown(int communicator, uint32_t epoch) {
  const Gone gone{communicator, epoch};
  Tell(Type::kTeardown, -1,
       std::string(reinterpret_cast<const char*>(&gone), sizeof gone));
}

void Heartbeat::OnTeardown(State* state, const std::string& text) {
  Gone gone;
  std::memcpy(&gone, text.data(), sizeof gone);
  std::lock_guard lock(mutex_);
  if (state->gone.size() < kMostGone || state->gone.contains(gone.communicator))
    state->gone[gone.communicator] = gone.epoch;
}

std::vector<int> Heartbeat::NotReady(int communicator, uint32_t epoch,
                                     const std::vector<int>& ranks) const {
  std::vector<int> holding;
  std::lock_guard lock(mutex_);
  if (stopping_) return holding;
  for (const State& state : states_) {
    const int rank = state.peer.rank;
    if (!state.open || state.left ||
        std::find(ranks.begin(), ranks.end(), rank) == ranks.end())
      continue;
    const auto found = state.gone.find(communicator);
    // A rank that is lost because it reported a failure still uses the shared memory.
    if (found == state.gone.end() || found->second != epoch) holding.push_back(rank);
  }
  return holding;
}

}  // namespace ringjax
