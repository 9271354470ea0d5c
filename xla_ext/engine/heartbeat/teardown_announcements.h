// TeardownAnnouncements: the teardown barrier over the sockets of the heartbeat. See
// heartbeat_client.h.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "engine/communicator/heartbeat_client.h"
#include "engine/heartbeat/control_connections.h"

namespace ringjax {

// Announces to all ranks which communicators this rank is ready to tear down, and
// records the announcements of the other ranks. Owned like ProbeSender. The heartbeat
// thread calls HandleTeardown, and any thread may call the other functions.
// ControlConnections::mutex() guards the state.
class TeardownAnnouncements : public TeardownBarrier {
 public:
  explicit TeardownAnnouncements(ControlConnections* connections)
      : connections_(connections) {}

  void AnnounceTeardown(int communicator, uint32_t epoch) override;
  std::vector<int> NotReady(int communicator, uint32_t epoch,
                            const std::vector<int>& ranks) const override;

  // Handles a message of type kTeardown.
  void HandleTeardown(int from, const std::string& text);
  // Records that the process of a rank has ended, so that no rank waits for its
  // announcement, and passes this on to the neighbours once.
  void HandleEnd(int rank);

 private:
  ControlConnections* const connections_;
  // The epochs that ranks are ready to tear down, by rank and then by id of the
  // communicator.
  std::map<int, std::map<int, uint32_t>> ready_;
  std::set<int> ended_;  // ranks whose processes have ended
};

}  // namespace ringjax
