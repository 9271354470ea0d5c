// ProbeSender: the straggler probes that this rank sends over the sockets of the
// heartbeat, and the replies of its peers. See straggler_probe.h.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "engine/communicator/straggler_probe.h"
#include "engine/heartbeat/control_connections.h"

namespace ringjax {

// Sends the probes and keeps the reply to the last probe of each peer about each
// communicator. A Heartbeat owns the object; communicators hold weak references that
// share the ownership of the heartbeat. The heartbeat thread calls OnAnswer, any thread
// the other functions. ControlConnections::mutex() guards the state.
class ProbeSender : public StragglerProbe {
 public:
  explicit ProbeSender(ControlConnections* connections)
      : connections_(connections), inquired_(connections->states().size()) {}

  void Ask(const Question& question) override;
  std::vector<ProbeReply> ProbeReplies(int communicator,
                                       const std::vector<int>& ranks) const override;

  // Handles a message of type kAnswer.
  void OnAnswer(PeerState* state, const std::string& text);

 private:
  // A probe that this rank has sent to a peer, and the reply.
  struct Inquired {
    uint32_t token = 0;
    double when = 0;  // sent at, in seconds of SecondsNow
    bool answered = false, entered = false;
    std::string text;
  };

  ControlConnections* const connections_;
  // The last probe: by PeerState::index, then by id of the communicator.
  std::vector<std::map<int, Inquired>> inquired_;
  uint32_t token_ = 0;  // token of the last probe that this rank has sent
};

}  // namespace ringjax
