// The stall monitor: what a call does when it has waited long for other ranks.
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
// thread that serves a call uses it. The arguments of the constructor must outlive the
// object.
class StallMonitor {
 public:
  StallMonitor(const CommState* state, const HeartbeatClient* heartbeat,
               const FailureReport* failures, CallLog* log)
      : state_(*state), heartbeat_(*heartbeat), failures_(*failures), log_(*log) {}

  void BeginCall();
  // Called after each wait of a call that has made no progress for `seconds`. See
  // Endpoints::on_stall.
  Status OnStall(const Call& call, double seconds, const std::vector<int>& peers,
                 bool* end);
  void EndRound();  // ends a round, which is no call and leaves no record

 private:
  void RecordWaiting(const Call& call, const std::vector<int>& peers);

  const CommState& state_;
  const HeartbeatClient& heartbeat_;
  const FailureReport& failures_;
  CallLog& log_;
  StallPolicy policy_;             // decisions about the current call
  bool waiting_recorded_ = false;  // the log has the wait of the current call
};

}  // namespace ringjax
