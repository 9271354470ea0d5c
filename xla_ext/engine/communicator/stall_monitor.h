// StallMonitor: probes other ranks and prints warnings when a call has waited long for
// them.
#pragma once

#include <vector>

#include "base/status.h"
#include "engine/call/descriptor.h"
#include "engine/communicator/call_log.h"
#include "engine/communicator/comm_state.h"
#include "engine/communicator/failure_report.h"
#include "engine/communicator/heartbeat_client.h"
#include "engine/communicator/straggler_probe.h"

namespace ringjax {

// Probes the late ranks, records what the call waits for, and prints warnings. Only the
// thread that runs a call uses the object. The arguments of the constructor must
// outlive the object.
class StallMonitor {
 public:
  StallMonitor(const CommState* state, const HeartbeatClient* heartbeat,
               const FailureReport* failures, CallLog* log)
      : state_(*state), heartbeat_(*heartbeat), failures_(*failures), log_(*log) {}

  void BeginCall();
  // Implements Endpoints::on_stall. Probes late ranks and prints a warning about a call
  // that has made no progress for `seconds`. Delays the warning, and the end of the
  // call, for a moment so that replies can arrive.
  Status OnStall(const Call& call, double seconds, const std::vector<int>& peers,
                 bool* end);
  void EndRound();  // clears the recorded wait of a round, which is not a call

 private:
  void RecordWaiting(const Call& call, const std::vector<int>& peers);

  const CommState& state_;
  const HeartbeatClient& heartbeat_;
  const FailureReport& failures_;
  CallLog& log_;
  StallPolicy policy_;             // when to probe and warn about the current call
  bool waiting_recorded_ = false;  // whether the log has the wait of the current call
};

}  // namespace ringjax
