// CallRunner: runs one call in one epoch, from its ticket to its results.
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
#include "engine/communicator/exact_exchange.h"
#include "engine/communicator/failure_report.h"
#include "engine/communicator/planner.h"
#include "engine/communicator/requests.h"
#include "engine/communicator/stall_monitor.h"

namespace ringjax {

// Runs the calls of a communicator one at a time, each on the thread that makes the
// call. Any thread may call InTurn and Guarded. The other functions may be called only
// by the `body` that InTurn or Guarded runs. The arguments of the constructor must
// outlive the object.
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

  // Takes a ticket of this epoch alone (CommState::own), waits until the ticket is
  // served, and runs `body` by Guarded.
  Status InTurn(const Call& call, const std::function<Status()>& body);
  // Runs `body` unless the communicator was aborted. If `body` throws, fails the call.
  // The caller must ensure that no other call runs.
  Status Guarded(const Call& call, const std::function<Status()>& body);

  // Checks whether this rank can do its part of the call. Sends nothing.
  Status Validate(const Call& call) const;
  // Sets the timeouts and the stall handler of the endpoints for this call, and fills
  // in the frame of its messages, except the sequence number.
  void Prepare(const Call& call, Frame* frame);
  // Gives the call its sequence number, and fills in the frame of its messages.
  Status Begin(const Call& call, Frame* frame);
  // Runs a call. `local_check` and `negotiated` are the arguments of
  // Communicator::RunInThisEpoch. Other callers pass null and false.
  Status Run(const Call& call, CallAttempt* attempt,
             const Status* local_check = nullptr, bool negotiated = false);
  // Implements Communicator::Compare.
  Status Compare(const Call& call, const Status& local_check, bool* refused);

 private:
  // The result of the agreement of all ranks to a call.
  struct Agreement {
    Status outcome;              // if this is an error, no rank moves data
    bool refused = false;        // whether every rank has refused the call
    bool splits_inline = false;  // input: whether the inline data contain the splits
    bool even = false;           // Problem::even of all requests
  };
  Status RunSteps(const Call& call, CallAttempt* attempt, const Status* local_check,
                  bool negotiated);
  // Begins a call and runs its agreement. Fails if the communicator was aborted. A
  // mismatch does not make this function fail, but sets `agreement->outcome`.
  Status BeginAndAgree(const Call& call, const Status& local_check, Frame* frame,
                       Waiter* waiter, Agreement* agreement);
  // Runs the agreement of a call that has begun. `valid`, the result of Validate or of
  // the caller's check, is the vote of this rank.
  Status AgreeOn(const Call& call, const Status& valid, const Frame& frame,
                 Waiter* waiter, Agreement* agreement);
  // Lets all ranks agree, once in a communicator, on whether each host has a segment:
  // the memory of a host may have been refused. Sets topology.segment. `op` is the
  // collective of a call to which all ranks have agreed.
  Status AgreeOnSegments(Collective op, const Frame& frame, Waiter* waiter);
  Status CheckSplits(const Call& call, const Frame& frame, Waiter* waiter,
                     bool* fit) const;
  // Completes an inline call from the data that arrived with the agreement, and clears
  // `requests`. Leaves `requests` unchanged if the data of some rank did not fit into
  // its inline slot: then all ranks send their data over links. Sets `*outcome` on a
  // mismatch.
  Status CompleteInline(const Call& call, Requests* requests, Status* outcome,
                        CallAttempt* attempt);
  Status RunRequest(Request* request, const Frame& frame, Waiter* waiter);
  // Runs an exchange of exact sums to which all ranks have agreed. Increments
  // `frame->step`.
  Status RunExchange(const Call& call, Frame* frame, Waiter* waiter);
  Status TryExchange(ExactExchange* exchange, Frame* frame, Waiter* waiter, bool* fits);
  Status GoesInTiles(const Request& whole, bool* in_tiles);
  Status FindDamage(ExactExchange* exchange, const Frame& frame, Waiter* waiter,
                    Status* blame);
  void ReportFault(const Call& call, const Status& blame) const;
  Status RunAdasum(Request* request, const Frame& frame, Waiter* waiter);
  // Adds `bytes` bytes of scratch_ to the buffers of the request. Grows scratch_ if
  // necessary.
  void AddScratch(Request* request, uint64_t bytes);
  // Returns whether the peer has invalidated its exposed bytes (transport/cma.h).
  bool HasInvalidated(int peer) const;

  CommState& state_;
  const FailureReport& failures_;
  CallLog& log_;
  StallMonitor& stalls_;
  Planner& planner_;
  CallCompletion& completion_;
  std::vector<std::byte> scratch_;
  ExchangeMemory exchange_memory_;
  bool segments_agreed_ = false;  // see AgreeOnSegments
};

}  // namespace ringjax
