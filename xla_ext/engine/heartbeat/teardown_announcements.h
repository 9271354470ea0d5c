// TeardownAnnouncements: the teardown barrier over the sockets of the heartbeat. See
// heartbeat_client.h.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "engine/communicator/heartbeat_client.h"
#include "engine/heartbeat/control_connections.h"

namespace ringjax {

// Announces to all peers which communicators this rank is ready to tear down, and
// records the announcements of the peers. Owned like ProbeSender. The heartbeat thread
// calls HandleTeardown, and any thread may call the other functions.
// ControlConnections::mutex() guards the state.
class TeardownAnnouncements : public TeardownBarrier {
 public:
  explicit TeardownAnnouncements(ControlConnections* connections)
      : connections_(connections), ready_(connections->states().size()) {}

  void AnnounceTeardown(int communicator, uint32_t epoch) override;
  std::vector<int> NotReady(int communicator, uint32_t epoch,
                            const std::vector<int>& ranks) const override;

  // Handles a message of type kTeardown.
  void HandleTeardown(PeerState* state, const std::string& text);

 private:
  ControlConnections* const connections_;
  // The epochs that peers are ready to tear down, by PeerState::index and then by id of
  // the communicator.
  std::vector<std::map<int, uint32_t>> ready_;
};

}  // namespace ringjax
