// Sends and handles kTeardown messages. See teardown_announcements.h.
#include "engine/heartbeat/teardown_announcements.h"

#include <algorithm>
#include <cstring>

namespace ringjax {
namespace {

using Teardown = ControlMessage::Teardown;

constexpr size_t kMaxAnnounced = 4096;  // communicators kept for each peer

}  // namespace

void TeardownAnnouncements::AnnounceTeardown(int communicator, uint32_t epoch) {
  const Teardown gone{communicator, epoch};
  connections_->SendToAll(ControlMessage::Type::kTeardown, -1, WithHead(gone, ""));
}

void TeardownAnnouncements::HandleTeardown(PeerState* state, const std::string& text) {
  Teardown gone;
  std::memcpy(&gone, text.data(), sizeof gone);
  std::lock_guard lock(connections_->mutex());
  std::map<int, uint32_t>& epochs = ready_[state->index];
  if (epochs.size() < kMaxAnnounced || epochs.contains(gone.communicator))
    epochs[gone.communicator] = gone.epoch;
}

std::vector<int> TeardownAnnouncements::NotReady(int communicator, uint32_t epoch,
                                                 const std::vector<int>& ranks) const {
  std::vector<int> holding;
  std::lock_guard lock(connections_->mutex());
  if (connections_->stopping()) return holding;
  for (const PeerState& state : connections_->states()) {
    const int rank = state.peer.rank;
    if (!state.open || state.left ||
        std::find(ranks.begin(), ranks.end(), rank) == ranks.end())
      continue;
    const std::map<int, uint32_t>& epochs = ready_[state.index];
    const auto found = epochs.find(communicator);
    // A rank that has reported a failure counts as lost, but may still use the memory.
    // So only a closed connection excludes a rank.
    if (found == epochs.end() || found->second != epoch) holding.push_back(rank);
  }
  return holding;
}

}  // namespace ringjax
