// Communicator: the ranks of one process set, the links between the ranks, and one
// order of calls.
//
// A process may have any number of communicators. Each serves its calls one at a time,
// in the order in which the callers took tickets, and runs each call on the thread that
// makes it. All ranks must make the same calls in the same order. Before any data move,
// the ranks compare fingerprints (engine/call/agreement.h). Calls read rank and size at
// run time. A compiled program contains them only where a shape depends on them, so the
// program can outlive a change of membership.
//
// There are two kinds of failure, and neither ever ends the process:
//
//   mismatch   The ranks disagree about a call, or some rank cannot make it. This call
//              fails on all ranks, nothing is exchanged, and the communicator remains
//              usable.
//   abort      A peer or a link is lost, a deadline has passed, or this process was
//              interrupted. The pending call and all later calls fail with the reason
//              of the first abort.
//
// A communicator is an epoch of a ResilientComm (resilient_comm.h), and in a static job
// its only epoch. xla_ext/README.md has a table of the classes that compose a
// communicator.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "engine/call/descriptor.h"
#include "engine/communicator/call_completion.h"
#include "engine/communicator/call_log.h"
#include "engine/communicator/call_runner.h"
#include "engine/communicator/comm_state.h"
#include "engine/communicator/consistency_checks.h"
#include "engine/communicator/failure_report.h"
#include "engine/communicator/heartbeat_client.h"
#include "engine/communicator/planner.h"
#include "engine/communicator/progress.h"
#include "engine/communicator/rounds.h"
#include "engine/communicator/stall_monitor.h"

namespace ringjax {

// A communicator on this rank. The comment at the top of this file lists the
// guarantees.
//
// All users (Python, the registry, the eager lanes and others) share the ownership,
// except the heartbeat and the ResilientComm, which hold weak references.
//
// Any thread may call any function, except where a comment or the heading of a section
// says otherwise.
class Communicator : public std::enable_shared_from_this<Communicator> {
 public:
  // links[r] leads to rank r and is null for this rank. `segment` requires that all
  // ranks are on one host; either every rank has one, or no rank. With `resilient`,
  // this communicator becomes an epoch of `resilient` when it is installed there; calls
  // before that moment are never repeated. Without `resilient`, this communicator is
  // static: the only epoch of its own ResilientComm.
  Communicator(CommunicatorOptions options, std::vector<std::unique_ptr<Link>> links,
               std::unique_ptr<Doorbell> doorbell,
               std::unique_ptr<SharedSegment> segment = nullptr,
               std::shared_ptr<ResilientComm> resilient = nullptr);
  // Waits until the peers have received what this rank has sent, for at most two
  // seconds, unless an abort has another reason than kShutDown.
  ~Communicator();
  static constexpr char kShutDown[] = "the communicator was shut down";

  int id() const { return state_.id(); }
  int rank() const { return state_.rank(); }
  int size() const { return state_.size(); }
  uint32_t epoch() const { return options().epoch; }
  const CommunicatorOptions& options() const { return state_.options; }
  std::string Prefix() const { return state_.Prefix(); }

  // -- running calls -----------------------------------------------------------------

  // Runs one call on this thread, and returns when the results are in their buffers.
  // The call runs in the current epoch, even if `this` is an earlier epoch, and runs
  // again in the next epoch if the current one ends before the call is committed.
  // `*epoch` receives the epoch in which the call completed.
  Status Run(const Call& call, uint32_t* epoch = nullptr);

  // Run, split into two functions. TakeTicket fixes the position of the call in the
  // order of calls. RunInTurn waits until the ticket is served, and runs the call. A
  // ticket that is never used blocks all calls behind it until the communicator is
  // aborted or its ResilientComm ends.
  uint64_t TakeTicket();
  Status RunInTurn(uint64_t ticket, const Call& call, uint32_t* epoch = nullptr);

  // Runs the last call of a chain. All calls of a chain must complete in one epoch: for
  // example, all buckets of a training step must be averaged over the same ranks. The
  // other calls of the chain must have run before. If the last call completes in a
  // later epoch, the other calls run again there before the next ticket is served. If
  // the chain fails, it fails on all ranks, and no result of the chain may be used.
  struct ChainedCall {
    const Call* call;
    uint32_t epoch = 0;  // the epoch in which the call completed
  };
  Status RunLastOfChain(uint64_t ticket, std::vector<ChainedCall>* chain);

  // Runs the call in this epoch only. If the epoch ends during the call, blocks until
  // the commit decision has arrived, and returns kUnavailable if the call is not
  // committed. The caller must then repeat the call, so it must have kept the inputs.
  // `local_check` is the caller's own check of the call; an error makes the call fail
  // on all ranks. `negotiated` says that the negotiation of an eager lane has
  // established that every rank makes the call and can make it, which is allowed only
  // if rounds are final (Rounds::final). Then there is no agreement, unless the data
  // are inline, because inline data travel with the agreement.
  Status RunInThisEpoch(const Call& call, const Status& local_check = OkStatus(),
                        bool negotiated = false);

  // Runs only the agreement of a call, for a backend that moves the data itself (NCCL).
  // `local_check` is the backend's own check of the call. If the call fails, `*refused`
  // says whether every rank has refused it, so that no rank begins it. The caller must
  // set `*refused` to false; it stays false if the ticket is not served.
  Status Compare(const Call& call, const Status& local_check, bool* refused);

  // Checks whether this rank can do its part of the call. Sends nothing.
  Status Validate(const Call& call) const { return runner_.Validate(call); }

  // Prepends Prefix() and the operation, with which every error message begins.
  Status WithContext(const Call& call, const Status& status) const {
    return failures_.WithContext(call, status);
  }

  Rounds& rounds() { return rounds_; }  // only an eager lane uses rounds

  // -- the interface of an epoch to its ResilientComm --------------------------------

  const std::shared_ptr<ResilientComm>& resilient() const { return state_.resilient; }
  // The index, from 1, of this communicator among the epochs of its ResilientComm. The
  // index is 0 until the communicator is installed, and always in a static job. In
  // contrast, epoch() is the index of the job's epoch, which all communicators share.
  uint64_t epoch_index() const { return epoch_index_.load(std::memory_order_acquire); }
  // Called by the ResilientComm when it installs this epoch. Progress reports do not
  // count the calls before.
  void OnInstalled(uint64_t epoch_index);
  // Returns the progress of this epoch's calls, which this rank reports after an abort.
  // The Progress object may outlive the communicator.
  const std::shared_ptr<Progress>& progress() const { return state_.progress; }

  // Runs the call once in this epoch. The ResilientComm calls this function while its
  // ticket lock serves the call. If `attempt->globally_complete` is false on return,
  // the epoch has ended during the call, and `*attempt` says how far the call got.
  Status Attempt(const Call& call, CallAttempt* attempt);
  // Completes a call that is committed although its epoch ended during the call. Reads
  // results that are not in place yet from the shared segment. Waits for no peer.
  Status CompleteCommitted(const Call& call, const CallAttempt& attempt) const {
    return completion_.CompleteCommitted(call, attempt);
  }
  // Waits, after an abort, until no call can change the progress report, and reads the
  // report. Fails with kDeadlineExceeded if a call does not stop within `seconds`, and
  // with kFailedPrecondition if the communicator was not aborted.
  Status Quiesce(double seconds, ProgressReport* report);

  // -- aborts and shutdowns ----------------------------------------------------------

  // Makes the pending call and every later call fail with `status`, whose rank is a
  // world rank. Only the first abort sets the status.
  void Abort(const Status& status) { state_.abort.Abort(status); }
  const AbortState& abort_state() const { return state_.abort; }
  const FailureReport& failures() const { return failures_; }
  Status abort_status() const { return state_.abort.status(); }
  bool aborted() const { return state_.abort.aborted(); }
  // Aborts and notifies the peers. `culprit` is the world rank to blame, or -1 for this
  // rank, which then takes part in no later epoch. `what` is a predicate that says what
  // the culprit did: "was interrupted". If the communicator was aborted before, only
  // ends the ResilientComm, and only if `culprit` is -1.
  void AbortAndNotifyPeers(Code code, const std::string& what, int culprit = -1) {
    failures_.AbortAndNotifyPeers(code, what, culprit);
  }
  // Records that a member has shut down cleanly after `finished` calls. Those calls may
  // still complete here. A later call fails immediately if it has not begun, and
  // otherwise after at most one second in which no data move.
  void OnPeerShutdown(int world_rank, uint64_t finished = 0) {
    state_.abort.OnPeerShutdown(world_rank, finished);
  }

  // -- diagnostics and settings ------------------------------------------------------

  HeartbeatClient& heartbeat() { return heartbeat_; }
  CallLog& log() { return log_; }
  const CallLog& log() const { return log_; }
  // Sequence numbers of the call that was begun last, and of the call that was finished
  // last. The loads are relaxed, so another thread may see earlier numbers.
  uint64_t entered() const { return state_.sequence(); }
  uint64_t finished() const { return state_.finished.load(std::memory_order_relaxed); }

  // Replaces the cost model and the forced algorithms between two calls, and clears all
  // plans and statistics. All ranks must pass equal arguments at one position in the
  // order of calls. With `trial`, the recorder receives no calls until SetCostModel is
  // called again. Does nothing if no call can follow.
  void SetCostModel(const CostModel& cost, const std::string& algorithm,
                    bool trial = false);

  ConsistencyChecks& consistency_checks() { return consistency_checks_; }
  std::map<std::string, int> transports() const;  // numbers of links

 private:
  friend class PointToPoint;

  // The ResilientComm that orders the calls: CommState::own until this communicator is
  // installed in another ResilientComm.
  ResilientComm& order() const;

  CommState state_;
  std::atomic<uint64_t> epoch_index_{0};
  HeartbeatClient heartbeat_{state_};
  FailureReport failures_{&state_, &heartbeat_};
  CallLog log_{state_};
  StallMonitor stalls_{&state_, &heartbeat_, &failures_, &log_};
  Planner planner_{state_};
  CallCompletion completion_{&state_, &failures_};
  CallRunner runner_{&state_, &failures_, &log_, &stalls_, &planner_, &completion_};
  Rounds rounds_{&state_, &runner_, &failures_, &log_, &stalls_, &planner_};
  ConsistencyChecks consistency_checks_;
};

}  // namespace ringjax
