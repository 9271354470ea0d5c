// The call runner: one call of one epoch, from its ticket to its results.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "base/status.h"
#include "engine/call/descriptor.h"
#include "engine/call/frame.h"
#include "engine/communicator/call_completion.h"
#include "engine/communicator/call_log.h"
#include "engine/communicator/comm_state.h"
#include "engine/communicator/failure_report.h"
#include "engine/communicator/planner.h"
#include "engine/communicator/requests.h"
#include "engine/communicator/stall_monitor.h"

namespace ringjax {

// Runs the calls of a communicator one at a time, each on the thread that makes it: the
// agreement, the data, and the end. Any thread may call InTurn and Guarded; the other
// functions run inside of them. The arguments of the constructor must outlive the
// object.
class CallRunner {
 public:
  CallRunner(CommState* state, const FailureReport* failures, CallLog* log,
             StallMonitor* stalls, Planner* planner, CallCompletion* completion)
      : state_(*state),
        failures_(*failures),
        log_(*log),
        stalls_(*stalls),
        planner_(*planner),
        completion_(*completion) {}

  // Runs `body` as a call of this epoch only (CommState::own), by Guarded.
  Status InTurn(const Call& call, const std::function<Status()>& body);
  // Runs `body` unless the communicator was aborted. An exception is a failure. The
  // caller makes sure that no other call runs.
  Status Guarded(const Call& call, const std::function<Status()>& body);

  // Checks whether this rank can do its part of the call. Sends nothing.
  Status Validate(const Call& call) const;
  // Gives the call its sequence number and fills in the frame of its messages.
  Status Begin(const Call& call, Frame* frame);
  // Runs a call. `local_check` and `negotiated` are the arguments of
  // Communicator::RunInThisEpoch. Other callers pass null and false.
  Status Run(const Call& call, CallAttempt* attempt,
             const Status* local_check = nullptr, bool negotiated = false);
  // Implements Communicator::Compare.
  Status Compare(const Call& call, const Status& local_check, bool* refused);

 private:
  // The result of the agreement about a call.
  struct Agreement {
    Status outcome;            // if this is an error, no rank moves data
    bool refused = false;      // every rank has refused the call
    bool told_splits = false;  // an input: inline data contain the splits
  };
  Status Perform(const Call& call, CallAttempt* attempt, const Status* local_check,
                 bool negotiated);
  // Begins the call and agrees about it. An error means that the communicator was
  // aborted; a mismatch is not an error but is in `agreement->outcome`.
  Status Enter(const Call& call, const Status& local_check, Frame* frame,
               Waiter* waiter, Agreement* agreement);
  // Agrees about a call that has begun. Returns errors as Enter does. `valid`, the
  // result of Validate or of the caller's check, is the vote of this rank.
  Status AgreeOn(const Call& call, const Status& valid, const Frame& frame,
                 Waiter* waiter, Agreement* agreement);
  Status CheckSplits(const Call& call, const Frame& frame, Waiter* waiter,
                     bool* fit) const;
  // Completes an inline call from the data that came with the agreement. Clears
  // `requests` on success; leaves them if the data of some rank did not fit into its
  // inline slot, so that all ranks send their data. Sets `*outcome` on a mismatch.
  Status CompleteInline(const Call& call, std::vector<Request>* requests,
                        Status* outcome, CallAttempt* attempt);
  Status RunRequest(Request* request, const Frame& frame, Waiter* waiter);
  Status RunAdasum(Request* request, const Frame& frame, Waiter* waiter);
  // Adds `bytes` bytes of scratch_ to the buffers of the request. Grows scratch_ if it
  // is smaller.
  void AddScratch(Request* request, uint64_t bytes);
  // Whether the peer has invalidated its exposed bytes (transport/cma.h).
  bool HasInvalidated(int peer) const;

  CommState& state_;
  const FailureReport& failures_;
  CallLog& log_;
  StallMonitor& stalls_;
  Planner& planner_;
  CallCompletion& completion_;
  std::vector<std::byte> scratch_;
};

}  // namespace ringjax
