// Sends and handles kTeardown messages. See teardown_announcements.h.
#include "engine/heartbeat/teardown_announcements.h"

#include <cstring>

namespace ringjax {
namespace {

using Teardown = ControlMessage::Teardown;

constexpr size_t kMaxAnnounced = 4096;  // communicators kept for each peer

}  // namespace

void TeardownAnnouncements::AnnounceTeardown(int communicator, uint32_t epoch) {
  const Teardown gone{communicator, epoch};
  std::lock_guard lock(connections_->mutex());
  for (int rank = 0; rank < connections_->size(); ++rank)
    if (rank != connections_->rank())
      connections_->Send(rank, ControlMessage::Type::kTeardown, WithHead(gone, ""));
}

void TeardownAnnouncements::HandleTeardown(int from, const std::string& text) {
  Teardown gone;
  std::memcpy(&gone, text.data(), sizeof gone);
  std::lock_guard lock(connections_->mutex());
  std::map<int, uint32_t>& epochs = ready_[from];
  if (epochs.size() < kMaxAnnounced || epochs.contains(gone.communicator))
    epochs[gone.communicator] = gone.epoch;
}

void TeardownAnnouncements::HandleEnd(int rank) {
  {
    std::lock_guard lock(connections_->mutex());
    if (!ended_.insert(rank).second) return;
  }
  connections_->SendToNeighbours(ControlMessage::Type::kEnded, rank, "");
}

std::vector<int> TeardownAnnouncements::NotReady(int communicator, uint32_t epoch,
                                                 const std::vector<int>& ranks) const {
  std::vector<int> holding;
  std::lock_guard lock(connections_->mutex());
  if (connections_->stopping()) return holding;
  std::set<int> gone = ended_;
  for (const PeerState& state : connections_->states())
    if (state.left || state.moved_on) gone.insert(state.peer.rank);
  for (const int rank : ranks) {
    // A rank that has reported a failure counts as lost, but may still use the memory.
    // So only the end of its process excludes a rank.
    if (rank == connections_->rank() || gone.contains(rank)) continue;
    const auto epochs = ready_.find(rank);
    const auto* known = epochs == ready_.end() ? nullptr : &epochs->second;
    if (!known || !known->contains(communicator) || known->at(communicator) != epoch)
      holding.push_back(rank);
  }
  return holding;
}

}  // namespace ringjax
