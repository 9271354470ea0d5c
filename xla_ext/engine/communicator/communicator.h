// A communicator: the ranks of one process set, their links, one order of calls.
//
// No global state: a process may have many. Calls are served in the order in which they
// arrive (one lane); a call runs on the thread that makes it. Rank and size are asked
// for here at run time and are never part of a compiled program unless a shape needs
// them. A failure is a Status for every pending and later call, never an abort of the
// process; a mismatch fails one call on all ranks and leaves the communicator usable.
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
#include "engine/call/turnstile.h"
#include "engine/communicator/farewell.h"
#include "engine/communicator/inquiry.h"
#include "engine/communicator/progress.h"
#include "engine/recorder/recorder.h"

namespace ringjax {

// The id of the one beside the world that compares what its devices do.
inline constexpr int kWorldControl = 1 << 30;

class Communicator;

struct CommunicatorOptions {
  int id = 0;
  std::string name = "world";
  uint64_t job = 0;
  uint32_t epoch = 0;
  Topology topology;
  std::vector<int> members;  // world rank of each rank here
  double spin_seconds = 50e-6;
  double stall_warning = 30;        // seconds
  double collective_timeout = 300;  // seconds, 0 = never
  std::string algorithm;  // "", a name, or "allreduce:ring,broadcast:binomial"
  CostModel cost;
  std::shared_ptr<Recorder> recorder;  // hears of every call; may be null
  int set = 0;                         // number of the process set, for it
  // Of a CUDA device among those of this process. What the first one is called for
  // stands for the calls of all, or a step would look like as many as there are.
  int place = 0;
  // The calls are an eager lane's, which tells the recorder what they were made of.
  bool named = false;
  // Of one that is beside others with the same calls (a job of groups): its calls end
  // when those of all have, which the ranks of `ending` tell each other; a failure of
  // one is one of all, and no call is finished here that is not finished there.
  // `ending` has no succession, and no other calls. What lies on a board here says
  // nothing about the others, so no call ends by that alone. Null: the end is a matter
  // of this one.
  std::shared_ptr<Communicator> ending;
};

// What was exchanged, per collective. `bytes` counts the tensors, not the wire.
struct OpStats {
  uint64_t calls = 0, bytes = 0, sent_bytes = 0;
  double seconds = 0;
  std::map<std::string_view, uint64_t> algorithms;  // calls, by name in the table
};

// How a communicator reaches the heartbeat of its process. Each may be empty.
struct HeartbeatHooks {
  // Called once, on the failing thread, when a call fails in a way that ends the
  // communicator, so that the peers can be told.
  std::function<void(const Status&)> on_failure;
  // World ranks known not to have entered call `sequence` yet.
  std::function<std::vector<int>(uint64_t sequence)> laggards;
  std::weak_ptr<Inquiry> inquiry;    // asks late ranks where they are
  std::weak_ptr<Farewell> farewell;  // lets members part together
};

// How far a call got in a communicator that was aborted under it.
struct Attempt {
  bool over = false;      // not at all: the status is what all ranks have
  uint64_t sequence = 0;  // its number, counted since the installation
  bool complete = false;  // its results are here, or the error that all ranks have
  Status outcome;         // of one that is complete
  // What else can finish it, if it counts as finished.
  enum class Rest { kNothing, kNote, kTiles, kLost } rest = Rest::kLost;
  // On a board, what its counters say once nobody needs the others any more:
  uint64_t turn = 0;    // kNote and, unless 0, kNothing: all have called
  uint64_t summed = 0;  // kTiles: all sums are there
};

// What a rank tells of itself when another one asks where it is.
struct Trace {
  bool any = false;    // there is something to tell
  bool waits = false;  // in a call, for other ranks
  Clock::time_point when;
  std::string text;  // "its last call was allgather 'x' (seq 6)"
};

class Succession;

// Shared: Python, the registry and (weakly) the heartbeat hold the same one.
class Communicator : public std::enable_shared_from_this<Communicator> {
 public:
  // `board` is for ranks that all share one host, on all of them or on none. With a
  // `succession` this is one of its generations, from the moment it is installed there.
  Communicator(CommunicatorOptions options, std::vector<std::unique_ptr<Link>> links,
               std::unique_ptr<Doorbell> doorbell,
               std::unique_ptr<Board> board = nullptr,
               std::shared_ptr<Succession> succession = nullptr);
  ~Communicator();

  int id() const { return options_.id; }
  int rank() const { return options_.topology.rank; }
  int size() const { return options_.topology.size; }
  uint32_t epoch() const { return options_.epoch; }
  const CommunicatorOptions& options() const { return options_; }
  // "RINGJAX[world, epoch 0]: ", the mark of every message that leaves the core.
  std::string Prefix() const;

  // Runs one call on this thread and returns when its results are in place. Of a
  // generation: in the one of the moment, and again if that ends (succession.h).
  // `*epoch`: where it ran.
  Status Run(const Call& call, uint32_t* epoch = nullptr);

  // The same in two halves for callers that already hold a place in the order.
  uint64_t TakeTicket();
  Status RunInTurn(uint64_t ticket, const Call& call, uint32_t* epoch = nullptr);
  // Calls of which all are to have one membership: those before the last one have run.
  // Runs that one, and if it is in another epoch than they are, in the same turn them
  // once more. Not ok: they are of no use, on all ranks alike.
  struct Piece {
    const Call* call;
    uint32_t epoch = 0;  // where it ran
  };
  Status RunLast(uint64_t ticket, std::vector<Piece>* pieces);
  // In this generation only. If that ends under the call, this parks until it is known
  // whether the call counts as finished, and is kUnavailable if not. `fits` is what the
  // caller thinks of the call; who repeats it is the caller, so inputs are its matter.
  Status RunOnce(const Call& call, const Status& fits = OkStatus());
  // Of one without a succession, for a call about which all ranks know already that all
  // of them make it and can: they agree once more only if its values go with that.
  Status RunDecided(const Call& call);

  // -- as a generation ---------------------------------------------------------------

  const std::shared_ptr<Succession>& succession() const { return succession_; }
  // Its number in the succession; 0: not installed.
  uint64_t generation() const { return generation_.load(std::memory_order_acquire); }
  void Installed(uint64_t generation);  // by the succession, which counts from here on
  // Of one with a succession: outlives it there.
  const std::shared_ptr<Progress>& progress() const { return progress_; }
  // One call here, in somebody else's turn. Unless `over`, this communicator has ended.
  Status Try(const Call& call, Attempt* attempt);
  // The call counts as finished, and this communicator has ended: its results.
  Status Complete(const Call& call, const Attempt& attempt);
  // After an abort: waits until no call makes progress here. kDeadlineExceeded: one
  // does not stop. kFailedPrecondition: this was not aborted.
  Status Quiesce(double seconds, Standing* standing);

  // Only finds out whether all ranks mean the same call and can do it; moves no tensor.
  // For backends that move them another way: `fits` is what such a one thinks of it.
  // `*refused`: not ok only because no rank can do it, so none has begun.
  Status Compare(const Call& call, const Status& fits, bool* refused);
  // Whether this rank's part of the call is possible at all. Sends nothing.
  Status Validate(const Call& call) const;
  // `status` as it is shown: with the mark of this communicator and the operation.
  Status Named(const Call& call, const Status& status) const;

  // Rounds, of a communicator that one thread alone uses. Every rank gives all others a
  // message; they come by rank. A step in the one order of calls, like Run.
  Status Exchange(const std::string& own, std::vector<std::string>* all,
                  Beside* beside = nullptr);
  // Whether values of an operation may travel beside messages: ranks have a board, a
  // round is as final as a call, and nobody wants another algorithm.
  bool HasBeside(Collective op) const {
    return lane_.board && !progress_ && ForcedAlgorithm(op).empty();
  }
  // A call whose inputs all ranks have given in the last round, `values` by rank: whole
  // tensors, but for broadcast nothing of the others than the root. Sums without
  // prescale, broadcast, allgather, and alltoall in equal parts, of one tensor.
  Status RunBeside(const Call& call,
                   std::span<const std::span<const std::byte>> values);
  // Sleeps until a peer has begun the next call (`*called`), Wake was called, or the
  // deadline. A peer that is gone ends the communicator if it is `needed`; else the
  // next call finds out.
  Status Await(Clock::time_point deadline, bool needed, bool* called);
  void Wake();  // from any thread

  // Fails every pending and later call. The first reason stays. `status` names a world
  // rank. Callable from any thread, also from the heartbeat.
  void Abort(const Status& status);
  Status abort_status() const;
  // Aborts because of what this rank did ("was interrupted"), or the one of the world
  // that is to blame, and tells the peers.
  void GiveUp(Code code, const std::string& what, int culprit = -1);
  // A member left in good order, with so many calls behind it. These can still finish
  // here; a later one fails, at the latest a second after nothing moves any more.
  void PeerLeft(int world_rank, uint64_t finished = 0);
  // Names a member that has left before call `sequence` was over.
  Status CheckLeft(uint64_t sequence) const;
  bool aborted() const { return aborted_.load(std::memory_order_acquire); }

  // From now on the heartbeat is told of failures and asked about other ranks. From any
  // thread.
  void SetHooks(HeartbeatHooks hooks);
  // After the end: lets go of what members share beside the links, and waits until all
  // who live have let go as well, so long at most. Says whether they have.
  bool PartTogether(double seconds);
  // Asks members, named by their world ranks, about an operation that runs its own
  // protocol here; and what is known of them since.
  void AskAbout(uint64_t operation, const std::vector<int>& ranks,
                const std::string& what);
  std::vector<Sighting> Sightings(const std::vector<int>& ranks) const;
  Trace trace() const;  // from any thread
  // What is still missing before this rank can make its next call, for the trace:
  // "device 1 of its own to come to allreduce 'x'", or nothing. From any thread.
  void set_missing(std::function<std::string()> f);

  // From now on: what algorithms are chosen by, alike on all ranks. `algorithm` as in
  // CommunicatorOptions. Between two calls; forgets plans and statistics. `trial`: the
  // recorder does not hear of calls until the next time.
  void SetCost(const CostModel& cost, const std::string& algorithm, bool trial = false);

  // Of the thread that has just made a call here: what became of it.
  const Event& event() const { return event_; }
  const std::shared_ptr<Recorder>& recorder() const { return options_.recorder; }
  uint64_t entered() const { return entered_.load(std::memory_order_relaxed); }
  // The last call that has ended here, or an earlier one.
  uint64_t finished() const { return finished_.load(std::memory_order_relaxed); }
  // Of a check whether all ranks have the same parameters (ffi/check.cc): how often it
  // was called or looked, and whether its last look has warned.
  struct Comparison {
    std::atomic<uint32_t> count{0};
    std::atomic<bool> warned{false};
  };
  Comparison& comparison(uint64_t whose);
  std::map<std::string, OpStats> stats() const;
  std::map<std::string, int> transports() const;

 private:
  // A piece of a call with one element type: one problem, one plan.
  struct Request {
    Problem problem;
    Arithmetic arithmetic;
    Memory memory;
    Spans in, out;
    std::vector<uint64_t> sizes;  // with Adasum: elements of each tensor
    uint64_t bytes = 0;
    uint64_t pieces = 0;  // of `in` at most, alike on all ranks

    // Of what a sum is made of.
    uint64_t wire_bytes() const {
      return in.bytes() / Width(arithmetic.dtype) * Width(arithmetic.wire);
    }
  };

  // Of this generation alone: serves `body` when it is the ticket's turn.
  Status InTurn(uint64_t ticket, const Call& call, const std::function<Status()>& body);
  // While it lives, a call may make progress here.
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
  // In a turn: `body`, unless this was aborted; exceptions become a failure.
  Status Guarded(const Call& call, const std::function<Status()>& body);
  bool Continues() const { return generation() > 0; }
  // `fits`: of RunOnce, else null. `decided`: of RunDecided.
  Status RunExclusive(const Call& call, Attempt* attempt, const Status* fits = nullptr,
                      bool decided = false);
  Status Perform(const Call& call, Attempt* attempt, const Status* fits, bool decided);
  // A call whose rest is on the board has no barrier at its end. So whoever stops says
  // so there and then looks once more, and whoever has all looks for who has stopped: a
  // rank that was frozen, say, returns from no call that the others run again.
  void Seal(Attempt* attempt);
  int Sealed(const Attempt& attempt) const;  // who has stopped; -1: nobody
  bool Shown(const Attempt& attempt) const;  // all that its rest needs
  // What tells that the others have their results as well.
  enum class Barrier { kNone, kFetched, kFrames };
  // The end of a call: its results are complete here, and its outcome the same on all.
  // With a succession, waits until they are complete everywhere.
  Status Close(const Call& call, const Status& outcome, Barrier barrier,
               const Frame& frame, Waiter* waiter, Attempt* attempt);
  // The end of a call here and beside: `outcome`, or that it has failed elsewhere.
  Status EndEverywhere(const Call& call, const Status& outcome);
  // Counts the call and makes the frame of its messages.
  Status Begin(const Call& call, Frame* frame);
  // What all ranks know about a call before it begins. Not ok: nobody does.
  struct Agreement {
    Status outcome;
    bool refused = false;      // because no rank can
    bool told_splits = false;  // goes in: of an alltoall, by notes
  };
  // The part before the data: begins the call, then agrees about it. Not ok: this
  // communicator has ended.
  Status Enter(const Call& call, const Status& fits, Frame* frame, Waiter* waiter,
               Agreement* agreement);
  // `valid` is what Validate found: this rank's vote.
  Status AgreeOn(const Call& call, const Status& valid, const Frame& frame,
                 Waiter* waiter, Agreement* agreement);
  Status CheckSplits(const Call& call, const Frame& frame, Waiter* waiter,
                     bool* fit) const;
  std::vector<Request> Split(const Call& call) const;
  // Whether the call is so short that its values go with the agreement.
  bool IsNote(const std::vector<Request>& requests) const;
  // After the agreement about such a call: finishes it, which leaves no request, or
  // finds that its bytes must travel after all; or `*outcome`, as in Agreement.
  Status TakeNotes(const Call& call, std::vector<Request>* requests, Status* outcome,
                   Attempt* attempt);
  Status RunRequest(Request* request, const Frame& frame, Waiter* waiter);
  // If the sums of this request, the only one, stay on the board: see Attempt::summed.
  uint64_t SumsStay(const Request& request);
  Status RunAdasum(Request* request, const Frame& frame, Waiter* waiter);
  // Lends the request this communicator's own memory.
  void AddScratch(Request* request, uint64_t bytes);
  void Count(const Request& request, std::string_view algorithm, uint64_t sent_bytes);
  // An algorithm and its compiled schedule; both are looked up once per problem.
  struct Planned {
    const Algorithm* algorithm;
    Plan plan;
  };
  Result<const Planned*> PlanFor(const Problem& problem, uint64_t bytes);
  std::string_view ForcedAlgorithm(Collective op) const;
  Status LookForCall(bool* called);
  std::vector<Waiter::Interest> Callers() const;
  HeartbeatHooks hooks() const;  // a copy: SetHooks may replace them meanwhile
  Status Fail(const Call& call, const Status& cause);  // ranks are those of here
  Status Aborted(const Call& call) const;
  void AwaitAbort(std::chrono::milliseconds patience) const;  // whoever finds out why
  bool GaveUp(int peer) const;  // the call, while its memory was read
  void AwaitNews() const;       // of a peer that stopped
  Status Blame(const Call& call, const Status& cause) const;
  void End(const Status& blame);  // aborts and tells the peers
  Status OnStall(const Call& call, double seconds, const std::vector<int>& peers,
                 bool* end);
  // World ranks that are known, or most likely, not to have made this call.
  std::vector<int> Late() const;
  std::vector<int> Others() const;  // world ranks, without this one; not too many
  void NoteWaiting(const Call& call, const std::vector<int>& peers);
  void AskWhereTheyAre(const Call& call, const std::vector<int>& peers);
  void StoppedWaiting();
  void Remember(const Call& call);                     // the one that has ended
  void Record(const Call& call);                       // that, and counts it
  void Note(const Call& call, Clock::time_point end);  // with mutex_ held
  // To the recorder: event_, which is over.
  void Report(const Call& call, Clock::time_point end, Code outcome);
  std::string Waited(const std::vector<int>& peers) const;
  // "allreduce 'x' (f32[4], SUM, seq 7)".
  std::string Where(const Call& call) const;

  // Only cost and algorithm ever change, in a turn.
  CommunicatorOptions options_;
  const std::unique_ptr<Doorbell> doorbell_;
  const std::shared_ptr<Succession> succession_;
  Lane lane_;
  bool crowded_ = false;
  bool trial_ = false;   // see SetCost; changes in a turn
  Turnstile turnstile_;  // before it is installed
  std::atomic<uint64_t> generation_{0};
  const std::shared_ptr<Progress> progress_;  // null without a succession
  std::atomic<uint64_t> entered_{0};   // sequence number of the call being served
  std::atomic<uint64_t> finished_{0};  // of the one that has ended last
  Patience patience_;                  // of that call
  Event event_;                        // that call, as far as it has come
  bool noted_ = false;                 // that it waits for long: in waiting_
  std::map<std::vector<uint64_t>, Planned> plans_;
  std::vector<std::byte> scratch_;

  std::unique_ptr<Waiter> resting_;  // of Await: it learns how long pauses are
  std::vector<bool> closed_;         // by rank: links that Await has found closed
  std::atomic<bool> asleep_{false}, woken_{false};

  std::atomic<bool> aborted_{false};
  std::atomic<bool> any_left_{false};
  mutable std::mutex mutex_;  // guards all below
  std::map<uint64_t, Comparison> comparisons_;
  std::map<int, uint64_t> left_;  // world ranks, and how many calls they had finished
  Status abort_status_;
  struct Last {  // the call that ended last
    Collective op = Collective::kBarrier;
    std::string name;
    uint64_t sequence = 0;  // 0: none has
    Clock::time_point end;
  } last_;
  std::string waiting_;  // the call that has been waiting for long, and for whom
  std::function<std::string()> missing_;
  std::array<OpStats, kCollectiveCount> stats_;  // by collective

  HeartbeatHooks hooks_;
};

}  // namespace ringjax
