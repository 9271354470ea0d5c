// FailureReport: finds the rank that caused a failure, and the error that all ranks
// report.
#pragma once

#include <string>

#include "base/status.h"
#include "engine/call/descriptor.h"
#include "engine/communicator/comm_state.h"
#include "engine/communicator/heartbeat_client.h"

namespace ringjax {

// Aborts the communicator after a failure, notifies the peers, ends the ResilientComm
// if this rank is the culprit, and composes the error of the call. Thread-safe. The
// arguments of the constructor must outlive the object.
class FailureReport {
 public:
  FailureReport(CommState* state, const HeartbeatClient* heartbeat)
      : state_(*state), heartbeat_(*heartbeat) {}

  // Aborts the communicator, unless it is aborted already, and returns the error of the
  // call. The rank of `cause` is a rank of this communicator, not of the world.
  Status Fail(const Call& call, const Status& cause) const;
  // Returns the error of a call on an aborted communicator.
  Status Aborted(const Call& call) const;
  // Waits at most 5 s until an abort reports why a peer has stopped.
  void AwaitReason() const;
  // Implements Communicator::AbortAndNotifyPeers.
  void AbortAndNotifyPeers(Code code, const std::string& what, int culprit) const;

  // Makes the recorder write its file, if `reason` names a culprit.
  void Dump(const Status& reason) const;
  // Prepends Prefix() and the operation, with which every error message begins.
  Status WithContext(const Call& call, const Status& status) const;
  // Returns "allreduce 'x' (f32[4], SUM, seq 7)".
  std::string DescribeCall(const Call& call) const;

 private:
  // Returns the error of a call that fails for `reason`.
  Status ErrorOf(const Call& call, const Status& reason) const;
  // Returns the world rank to blame, and a predicate that says what this rank did.
  Status FindCulprit(const Call& call, const Status& cause) const;
  // Aborts and notifies the peers. Returns false, and does nothing, if another thread
  // has already aborted the communicator, because peers must receive only one culprit.
  bool TryAbort(const Status& blame) const;

  CommState& state_;
  const HeartbeatClient& heartbeat_;
};

}  // namespace ringjax
