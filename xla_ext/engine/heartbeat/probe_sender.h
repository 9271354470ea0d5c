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

// Sends the probes, and stores for each peer and communicator the reply to the last
// probe. A Heartbeat owns the object. Communicators have weak pointers to it, which
// share the ownership of the heartbeat. The heartbeat thread calls HandleReply, and any
// thread may call the other functions. ControlConnections::mutex() guards the state.
class ProbeSender : public StragglerProbe {
 public:
  explicit ProbeSender(ControlConnections* connections) : connections_(connections) {}

  void SendProbes(const ProbeRequest& request) override;
  std::vector<ProbeReply> ProbeReplies(int communicator,
                                       const std::vector<int>& ranks) const override;

  // Handles a message of type kReply.
  void HandleReply(int from, const std::string& text);

 private:
  // A probe that this rank has sent to a peer, and the reply.
  struct SentProbe {
    uint32_t token = 0;
    double when = 0;  // when it was sent, in seconds of SecondsNow
    bool answered = false, entered = false;
    std::string text;
  };

  void Send(int rank, const ProbeRequest& request);  // the caller holds the mutex

  ControlConnections* const connections_;
  // The last probes, by id of the communicator and then by rank.
  std::map<int, std::map<int, SentProbe>> sent_;
  std::map<int, ProbeRequest> calls_;  // the last probe of a call, by communicator
  uint32_t token_ = 0;  // token of the last probe that this rank has sent
};

}  // namespace ringjax
