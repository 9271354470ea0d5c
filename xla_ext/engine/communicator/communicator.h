// A communicator: the ranks of one process set, the links between them, and one order
// of calls.
//
// A process may have any number of communicators. Each serves its calls one at a time,
// in the order in which the callers took tickets, and runs each call on the thread that
// makes it. All ranks must make the same calls in the same order; before any data moves
// they compare fingerprints (engine/call/agreement.h). Rank and size are looked up at
// run time. A compiled program contains them only where a shape depends on them, so the
// program can outlive a change of membership.
//
// There are two kinds of failure, and neither ever ends the process:
//
//   mismatch   The ranks disagree about a call, or some rank cannot make it. This one
//              call fails on all ranks, nothing is exchanged, and the communicator
//              remains usable.
//   abort      A peer or a link is lost, a deadline has passed, or this process was
//              interrupted. The pending call and all later ones fail with the first
//              reason.
//
// In an elastic job a communicator is one epoch of a ResilientComm (resilient_comm.h).
// When the communicator is aborted, the surviving ranks decide which of its calls are
// committed, and run the other calls again in the next epoch. ULFM calls these steps
// revoke, agree and shrink (Bland et al., "Post-failure recovery of MPI communication
// capability", IJHPCA 27(3), 2013).
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "collective/table.h"
#include "engine/call/agreement.h"
#include "engine/call/descriptor.h"
#include "engine/call/executor.h"
#include "engine/call/route.h"
#include "engine/call/ticket_lock.h"
#include "engine/communicator/progress.h"
#include "engine/communicator/straggler_probe.h"
#include "engine/communicator/teardown_barrier.h"
#include "engine/recorder/recorder.h"

namespace ringjax {

// The id of the world's control communicator, on which the ranks compare the calls that
// they make on their CUDA devices (device/consistency_checker.h).
inline constexpr int kWorldControl = 1 << 30;

class Communicator;

struct CommunicatorOptions {
  int id = 0;
  std::string name = "world";
  uint64_t job = 0;
  uint32_t epoch = 0;  // the number of the membership
  Topology topology;
  std::vector<int> world_ranks;     // by rank in this communicator
  double spin_seconds = 50e-6;      // longest spin before a waiting thread sleeps
  double stall_warning = 30;        // seconds
  double collective_timeout = 300;  // seconds; 0: never
  // Forces algorithms: "" for none, a name, or "allreduce:ring,broadcast:binomial".
  std::string algorithm;
  CostModel cost;

  std::shared_ptr<Recorder> recorder;  // receives an event for every call; may be null
  int process_set = 0;                 // its number, for the recorder
  // Index of the CUDA device among those of this process. Calls of device 0 are
  // recorded as calls and those of other devices only by their bytes; otherwise one
  // training step would look like as many as the process has devices.
  int device_index = 0;
  // The communicator belongs to an eager lane. The lane records its operations itself,
  // so the communicator records no calls.
  bool eager = false;
  // For a replica set of a resilient job: every call ends with a barrier on this
  // communicator of all replica sets, which make the same calls. A call that fails in
  // one set then fails in all of them. Data in this set's shared segment is therefore
  // never enough to complete a call. The communicator of all sets has no ResilientComm
  // and serves no other calls.
  std::shared_ptr<Communicator> end_barrier;
};

// Totals of one collective. `bytes` are those of the tensors, `sent_bytes` those that
// this rank has put on the wire.
struct OpStats {
  uint64_t calls = 0, bytes = 0, sent_bytes = 0;
  double seconds = 0;
  std::map<std::string_view, uint64_t> algorithms;  // calls, by name in the table
};

// The connection of a communicator to the heartbeat. Each member may be empty.
struct HeartbeatHooks {
  // Called after this rank itself has aborted the communicator, on the thread that did
  // so: the thread of a call that failed, or a caller of AbortAndNotifyPeers. Not
  // called by Abort. The heartbeat notifies the peers here.
  std::function<void(const Status&)> on_failure;
  // Returns the world ranks that have certainly not entered call `sequence`.
  std::function<std::vector<int>(uint64_t sequence)> late_ranks;
  std::weak_ptr<StragglerProbe> straggler_probe;
  std::weak_ptr<TeardownBarrier> teardown_barrier;
};

// How far a call got in an epoch that was aborted under the call. The work that remains
// after the commit decision depends on it.
struct CallAttempt {
  // Every rank has the outcome, or can complete the call alone, so the call may return
  // without a commit decision.
  bool globally_complete = false;
  // This rank has the results in place, or the error that all ranks have.
  bool locally_complete = false;
  Status outcome;         // valid if locally_complete
  uint64_t sequence = 0;  // number of the call in this epoch, from 1; 0: not known

  // The source of the results if this rank completes a committed call alone.
  enum class Source {
    kNotNeeded,    // the call has no results: a barrier, or only empty tensors
    kInlineData,   // the inline data of all ranks, in the shared segment
    kTileResults,  // the reduced tiles, in the shared segment (tiles.h)
    kNone,         // nowhere: only all ranks together can complete the call
  } source = Source::kNone;
  // Counter values that prove that the source is complete. A rank may rely on the
  // source once the counter of every rank has reached the value.
  uint64_t agreed = 0;   // kAgreed, for kInlineData and kNotNeeded; 0: no such proof
  uint64_t reduced = 0;  // kReduced, for kTileResults; 0: no such proof
};

// The reply of this rank to a straggler probe: its present wait, or its last call.
struct ProbeAnswer {
  bool has_text = false;  // false: this communicator has nothing to report
  bool waits = false;     // the rank is in a call and waits for other ranks
  Clock::time_point when;
  std::string text;  // "its last call was allgather 'x' (seq 6)"
};

class ResilientComm;

// This rank's end of a communicator. The comment at the top of this file says what it
// guarantees.
//
// All users share the ownership (Python, the registry, the eager lanes and others),
// except the heartbeat and the ResilientComm, which hold weak references.
//
// Any thread may call any function, except where a comment or the heading of a section
// says otherwise.
class Communicator : public std::enable_shared_from_this<Communicator> {
 public:
  // links[r] leads to rank r and is null for this rank. `segment` requires that all
  // ranks are on one host; either every rank has one, or no rank. With `resilient`,
  // this communicator becomes an epoch of that object when it is installed there. Calls
  // before that moment run here and are never repeated.
  Communicator(CommunicatorOptions options, std::vector<std::unique_ptr<Link>> links,
               std::unique_ptr<Doorbell> doorbell,
               std::unique_ptr<SharedSegment> segment = nullptr,
               std::shared_ptr<ResilientComm> resilient = nullptr);
  ~Communicator();

  int id() const { return options_.id; }
  int rank() const { return options_.topology.rank; }
  int size() const { return options_.topology.size; }
  uint32_t epoch() const { return options_.epoch; }
  const CommunicatorOptions& options() const { return options_; }
  // "RINGJAX[world, epoch 0]: ", the start of every error text that leaves the core.
  std::string Prefix() const;

  // -- calls -------------------------------------------------------------------------

  // Runs one call on this thread and returns when its results are in place. Under a
  // ResilientComm the call runs in the current epoch, whichever epoch `this` is, and
  // runs again if that epoch ends before the call is committed. `*epoch` receives the
  // epoch in which it completed.
  Status Run(const Call& call, uint32_t* epoch = nullptr);

  // Run in two halves: TakeTicket fixes the position of the call in the order of calls,
  // and RunInTurn waits until the ticket is served. A ticket that is never used blocks
  // all calls behind it until the communicator is aborted or its ResilientComm ends.
  uint64_t TakeTicket();
  Status RunInTurn(uint64_t ticket, const Call& call, uint32_t* epoch = nullptr);

  // Runs the last call of a chain, all of whose calls must complete in one epoch: the
  // buckets of one training step, say, must be averaged over the same ranks. The other
  // calls of the chain must have run. If the last call completes in a later epoch, the
  // other calls run again there before the next ticket is served. If the chain fails,
  // it fails on all ranks, and no result of the chain may be used.
  struct ChainedCall {
    const Call* call;
    uint32_t epoch = 0;  // the epoch in which the call completed
  };
  Status RunLastOfChain(uint64_t ticket, std::vector<ChainedCall>* chain);

  // Runs the call in this epoch only. If the epoch ends under the call, blocks until
  // the ranks have decided about the call, and returns kUnavailable if the call is not
  // committed. The caller then repeats it, and must have kept its inputs. `local_check`
  // is the caller's own check of the call: an error makes the call fail on all ranks.
  Status RunInThisEpoch(const Call& call, const Status& local_check = OkStatus());

  // Runs a call in a static job after the negotiation of the eager lane has established
  // that every rank makes the call and can make it. Skips the agreement, except if the
  // data are inline, because inline data travel with the agreement.
  Status RunNegotiated(const Call& call);

  // Agrees about a call and moves no data, for a backend that moves the data itself
  // (NCCL). `local_check` is the backend's own check of the call. If the result is not
  // ok, `*refused` says whether every rank has refused the call, so that no rank begins
  // it. `*refused` must be false before, and stays so if the ticket is not served.
  Status Compare(const Call& call, const Status& local_check, bool* refused);

  // Checks whether this rank can do its part of the call. Sends nothing.
  Status Validate(const Call& call) const;

  // Adds to an error what every error text contains: Prefix() and the operation.
  Status WithContext(const Call& call, const Status& status) const;

  // -- as an epoch of a ResilientComm -------------------------------------------------

  const std::shared_ptr<ResilientComm>& resilient() const { return resilient_; }
  // Position of this communicator among the epochs of its ResilientComm, from 1; 0
  // until it is installed. Not to be confused with epoch(), the number of the
  // membership, which other communicators share.
  uint64_t epoch_index() const { return epoch_index_.load(std::memory_order_acquire); }
  // Called by the ResilientComm. Progress reports number the calls that follow from 1.
  void OnInstalled(uint64_t epoch_index);
  // The report of this rank after an abort. Null without a ResilientComm. The object
  // may outlive the communicator.
  const std::shared_ptr<Progress>& progress() const { return progress_; }

  // Runs the call once in this epoch. The ResilientComm calls this function while its
  // ticket lock serves the call. Unless `attempt->globally_complete` is set on return,
  // this epoch has ended under the call, and `*attempt` says how far the call got.
  Status Attempt(const Call& call, CallAttempt* attempt);
  // Completes a call that the ranks have committed although its epoch ended under the
  // call. Reads results that are not in place yet from the shared segment. Waits for no
  // peer.
  Status CompleteCommitted(const Call& call, const CallAttempt& attempt);
  // Waits, after an abort, until no call can change the report any more, and reads it.
  // kDeadlineExceeded if a call does not stop in time, kFailedPrecondition if the
  // communicator was not aborted or has no ResilientComm.
  Status Quiesce(double seconds, ProgressReport* report);

  // -- rounds (one thread only: that of an eager lane) --------------------------------

  // Sends one message to every rank and receives one from each; `*all` is ordered by
  // rank. A round counts as a call but has no commit decision: if the epoch ends under
  // a round, one rank may have received its messages and another rank not.
  Status ExchangeRound(const std::string& own, std::vector<std::string>* all,
                       Piggyback* piggyback = nullptr);

  // Whether the data of an operation may be piggybacked on a round. That requires a
  // shared segment, no forced algorithm, and no ResilientComm: under a ResilientComm a
  // finished round is not as final as a finished call.
  bool CanPiggyback(Collective op) const {
    return endpoints_.segment && !progress_ && ForcedAlgorithm(op).empty();
  }
  // Completes a call from the data that all ranks have piggybacked on the last round.
  // values[r] is the whole input of rank r; in a broadcast only the root has one. The
  // call must have one tensor and be an allreduce or reduce-scatter without prescale, a
  // broadcast, an allgather, or an alltoall with equal splits.
  Status RunPiggybacked(const Call& call,
                        std::span<const std::span<const std::byte>> values);

  // Sleeps until a peer begins the next round (`*called` is set), Wake is called, or
  // the deadline passes. Aborts the communicator if a peer is gone and the next round
  // is `required`; otherwise the next call reports that peer.
  Status AwaitNextCall(Clock::time_point deadline, bool required, bool* called);
  void Wake();  // from any thread

  // -- failure ------------------------------------------------------------------------

  // Fails the pending call and every later call with `status`, whose rank is a world
  // rank. If there are several aborts, the first one gives the status.
  void Abort(const Status& status);
  Status abort_status() const;
  bool aborted() const { return aborted_.load(std::memory_order_acquire); }
  // Aborts, notifies the peers and names a culprit: a world rank, or -1 for this rank,
  // which then takes part in no later epoch. `what` is a predicate: "was interrupted".
  // After an earlier abort, only ends the ResilientComm, and only for culprit -1.
  void AbortAndNotifyPeers(Code code, const std::string& what, int culprit = -1);
  // Records that a member has shut down in good order after `finished` calls. Those
  // calls may still complete here. A later call fails: at once if it has not begun,
  // otherwise at the latest after a second in which no data move.
  void OnPeerShutdown(int world_rank, uint64_t finished = 0);
  // Fails if a member has shut down before it finished call `sequence`.
  Status CheckShutdowns(uint64_t sequence) const;

  // -- heartbeat ----------------------------------------------------------------------

  // Connects this communicator to a heartbeat, in place of any earlier one.
  void SetHooks(HeartbeatHooks hooks);

  // The teardown barrier. Announces, after an abort, that this rank is ready to release
  // the memory that ranks share outside their links (NCCL's), and waits at most
  // `seconds` until all live members have announced the same. Returns whether all have;
  // true without a heartbeat.
  bool AwaitTeardown(double seconds);

  // -- diagnostics --------------------------------------------------------------------

  // Sends a straggler probe to members, by world rank, about an operation of the eager
  // lane. `what` describes the operation. Returns at once; ProbeReplies has the replies
  // a moment later.
  void ProbeStragglers(uint64_t operation, const std::vector<int>& world_ranks,
                       const std::string& what);
  std::vector<ProbeReply> ProbeReplies(const std::vector<int>& world_ranks) const;
  // The reply of this rank to a straggler probe.
  ProbeAnswer probe_answer() const;
  // Sets a function that describes what this process itself lacks for its next call:
  // "device 1 of its own to come to allreduce 'x'", or "" for nothing. `f` may be
  // called on any thread.
  void set_missing_locally(std::function<std::string()> f);

  // Replaces the cost model and the forced algorithms between two calls, and clears all
  // plans and statistics. All ranks must pass the same arguments at the same position
  // in the order of calls. With `trial`, the recorder receives no calls until
  // SetCostModel is called again. Does nothing if no call can follow.
  void SetCostModel(const CostModel& cost, const std::string& algorithm,
                    bool trial = false);

  // The event of the last call. Only the thread that has made this call may read it.
  const Event& event() const { return event_; }
  const std::shared_ptr<Recorder>& recorder() const { return options_.recorder; }
  // Sequence numbers of the call that was begun last, and of the call that was finished
  // last. Relaxed: another thread may read an earlier number.
  uint64_t entered() const { return entered_.load(std::memory_order_relaxed); }
  uint64_t finished() const { return finished_.load(std::memory_order_relaxed); }
  // State of one check that all ranks hold the same parameters (ffi/check.cc).
  struct ConsistencyCheck {
    std::atomic<uint32_t> count{0};   // calls of the check, or 1 after a comparison
    std::atomic<bool> warned{false};  // the last comparison has found a difference
  };
  // The state of the check whose names hash to `site`. The reference is valid as long
  // as this communicator.
  ConsistencyCheck& consistency_check(uint64_t site);
  std::map<std::string, OpStats> stats() const;
  std::map<std::string, int> transports() const;  // links, by Link::transport()

 private:
  // The tensors of a call that move together, with one plan (Split, in requests.cc).
  struct Request {
    Problem problem;
    Arithmetic arithmetic;
    Buffers buffers;
    Spans in, out;
    std::vector<uint64_t> sizes;  // with Adasum: elements of each tensor
    uint64_t bytes = 0;

    // Bytes that one rank contributes to a reduction, in the element type of the wire.
    uint64_t wire_bytes() const {
      return in.bytes() / Width(arithmetic.dtype) * Width(arithmetic.wire);
    }
  };

  // Runs `body` in this epoch only, when ticket_lock_ serves the ticket.
  Status InTurn(uint64_t ticket, const Call& call, const std::function<Status()>& body);
  // Marks, while the object lives, that a call may change the progress report, so that
  // Quiesce waits for the call. Does nothing without a ResilientComm.
  class Active {
   public:
    explicit Active(Communicator* c) : c_(c->progress_ ? c : nullptr) {
      if (c_) c_->progress_->Begin();
    }
    ~Active() {
      if (c_) c_->progress_->End([this] { return c_->aborted_.load(); });
    }
    Active(const Active&) = delete;
    Active& operator=(const Active&) = delete;

   private:
    Communicator* c_;
  };
  // Runs `body` unless this communicator was aborted. An exception is a failure (Fail).
  Status Guarded(const Call& call, const std::function<Status()>& body);
  // Whether this communicator is, or was, installed in a ResilientComm.
  bool Continues() const { return epoch_index() > 0; }
  // Runs a call while no other call runs here. `local_check` comes from RunInThisEpoch
  // and is null otherwise; `negotiated` is true only from RunNegotiated.
  Status RunExclusive(const Call& call, CallAttempt* attempt,
                      const Status* local_check = nullptr, bool negotiated = false);
  Status Perform(const Call& call, CallAttempt* attempt, const Status* local_check,
                 bool negotiated);
  // A call that every rank can complete from the shared segment has no barrier at its
  // end. All ranks must still treat the call alike: a rank that was frozen, for
  // example, must not return from a call that the other ranks run again. So a rank
  // whose call has failed (Seal) sets its stop flag in the shared segment, and then
  // reads the counters of all ranks. A rank that has all data (Sealed) has published
  // its counter, and then reads the stop flags. All of these accesses are seq_cst:
  // either the failed rank sees every counter and reports the call as done, or every
  // other rank sees the stop flag and does not return. If a read could pass the write
  // before it, both ranks could miss each other.
  void Seal(CallAttempt* attempt);
  int Sealed(const CallAttempt& attempt) const;  // a rank that has stopped; -1: none
  bool Shown(const CallAttempt& attempt) const;  // whether its source is complete
  // How a rank waits at the end of a call until all ranks have their results: not at
  // all, for the kFinished counters of the tiles, or by a barrier of its own.
  enum class Barrier { kNone, kFinished, kFrames };
  // Ends a call whose results are complete on this rank and whose outcome is the same
  // on all ranks. Under a ResilientComm, first waits until all ranks have their
  // results, or can complete the call alone.
  Status Close(const Call& call, const Status& outcome, Barrier barrier,
               const Frame& frame, Waiter* waiter, CallAttempt* attempt);
  // Waits until the call has ended in all replica sets. Returns `outcome`, or the
  // failure of another set.
  Status EndEverywhere(const Call& call, const Status& outcome);
  // Gives the call its sequence number and fills in the frame of its messages.
  Status Begin(const Call& call, Frame* frame);
  // The result of the agreement about a call.
  struct Agreement {
    Status outcome;            // not ok: no rank moves data
    bool refused = false;      // every rank has refused the call
    bool told_splits = false;  // an input: the splits of an alltoall are inline data
  };
  // Begins the call and agrees about it. An error means that this communicator was
  // aborted; a mismatch is not an error but is in `agreement->outcome`.
  Status Enter(const Call& call, const Status& local_check, Frame* frame,
               Waiter* waiter, Agreement* agreement);
  // Agrees about a call that has begun. Errors as for Enter. `valid`, the result of
  // Validate or of the caller's check, is the vote of this rank.
  Status AgreeOn(const Call& call, const Status& valid, const Frame& frame,
                 Waiter* waiter, Agreement* agreement);
  Status CheckSplits(const Call& call, const Frame& frame, Waiter* waiter,
                     bool* fit) const;
  std::vector<Request> Split(const Call& call) const;
  // Whether the data of the call travel inline with the agreement.
  bool IsInline(const std::vector<Request>& requests) const;
  // Completes an inline call from the data that came with the agreement. Clears
  // `requests` on success; leaves them if the data of some rank did not fit into its
  // inline slot, so that all ranks send their data. Sets `*outcome` on a mismatch.
  Status CompleteInline(const Call& call, std::vector<Request>* requests,
                        Status* outcome, CallAttempt* attempt);
  Status RunRequest(Request* request, const Frame& frame, Waiter* waiter);
  // The value of CallAttempt::reduced for a call that consists of this request; 0 if
  // the results do not stay in the shared segment.
  uint64_t SumsStay(const Request& request);
  Status RunAdasum(Request* request, const Frame& frame, Waiter* waiter);
  // Adds scratch_ to the buffers of the request, grown to `bytes` if necessary.
  void AddScratch(Request* request, uint64_t bytes);
  // Adds a request to the statistics, and its route to the event.
  void Count(const Request& request, std::string_view algorithm, std::string_view route,
             uint64_t sent_bytes);
  // A route and the plan of its schedule, cached for each problem. kTiles has a plan,
  // too, for results that do not fit the tiles.
  struct Planned {
    Route route;
    Plan plan;
  };
  // For requests that are not inline. The pointer is valid until the next PlanFor,
  // which may clear a full cache.
  Result<const Planned*> PlanFor(const Request& request);
  RouteInputs InputsFor(Collective op) const;
  std::string_view ForcedAlgorithm(Collective op) const;
  Status LookForCall(bool* called);
  std::vector<Waiter::Interest> Callers() const;
  HeartbeatHooks hooks() const;  // a copy: SetHooks may replace hooks_
  // Aborts this communicator, unless it is aborted already, and returns the error of
  // the call. The rank of `cause` is a rank of this communicator, not of the world.
  Status Fail(const Call& call, const Status& cause);
  // Returns the error of a call after an abort.
  Status Aborted(const Call& call) const;
  // Waits until some thread aborts this communicator, at most `limit`.
  void AwaitAbort(std::chrono::milliseconds limit) const;
  // Whether the peer has invalidated its exposed bytes (transport/cma.h).
  bool HasInvalidated(int peer) const;
  // Waits for an abort that says why a peer has stopped, at most 5 s.
  void AwaitReason() const;
  // Returns the culprit, as a world rank, and a predicate: what the culprit did.
  Status Blame(const Call& call, const Status& cause) const;
  void End(const Status& blame);  // aborts and notifies the peers
  Status OnStall(const Call& call, double seconds, const std::vector<int>& peers,
                 bool* end);
  // World ranks that have not made the present call, as far as this rank can find out.
  std::vector<int> Late() const;
  std::vector<int> Others() const;  // world ranks of all other members
  void RecordWaiting(const Call& call, const std::vector<int>& peers);
  void AskWhereTheyAre(const Call& call, const std::vector<int>& peers);
  void StoppedWaiting();
  void Remember(const Call& call);                       // sets last_
  void Record(const Call& call);                         // also reports and counts it
  void Record(const Call& call, Clock::time_point end);  // sets last_; needs mutex_
  // Completes event_ and passes it to the recorder.
  void Report(const Call& call, Clock::time_point end, Code outcome);
  // "allreduce 'x' (f32[4], SUM, seq 7)".
  std::string Where(const Call& call) const;

  // After construction only `cost` and `algorithm` change, in SetCostModel, which holds
  // the ticket lock.
  CommunicatorOptions options_;
  const std::unique_ptr<Doorbell> doorbell_;
  const std::shared_ptr<ResilientComm> resilient_;
  Endpoints endpoints_;
  bool oversubscribed_ = false;
  bool trial_ = false;  // see SetCostModel
  // After the installation in a ResilientComm, TakeTicket, RunInTurn, RunLastOfChain
  // and SetCostModel use the lock of that object. The other functions always use this
  // one.
  TicketLock ticket_lock_;
  std::atomic<uint64_t> epoch_index_{0};
  const std::shared_ptr<Progress> progress_;  // null without a ResilientComm
  std::atomic<uint64_t> entered_{0};          // sequence number of the present call
  std::atomic<uint64_t> finished_{0};  // sequence number of the last finished call
  StallMonitor stall_monitor_;         // for the present call
  Event event_;                        // the present call, as far as it got
  bool waiting_recorded_ = false;      // waiting_ describes the present call
  std::map<std::vector<uint64_t>, Planned> plans_;
  std::vector<std::byte> scratch_;

  // For AwaitNextCall. The waiter is kept because it adapts to the length of the waits.
  std::unique_ptr<Waiter> resting_;
  std::vector<bool> closed_;  // by rank: links that AwaitNextCall found closed
  std::atomic<bool> asleep_{false}, woken_{false};  // see AwaitNextCall and Wake

  std::atomic<bool> aborted_{false};
  std::atomic<bool> any_shut_down_{false};
  mutable std::mutex mutex_;  // guards all below
  std::map<uint64_t, ConsistencyCheck> consistency_checks_;
  std::map<int, uint64_t> shut_down_;  // by world rank: number of finished calls
  Status abort_status_;
  struct Last {  // the last call that has ended
    Collective op = Collective::kBarrier;
    std::string name;
    uint64_t sequence = 0;  // 0: there is none
    Clock::time_point end;
  } last_;
  std::string waiting_;  // the call that has stalled, and a rank it waits for; or ""
  std::function<std::string()> missing_;
  std::array<OpStats, kCollectiveCount> stats_;  // by collective

  HeartbeatHooks hooks_;
};

}  // namespace ringjax
