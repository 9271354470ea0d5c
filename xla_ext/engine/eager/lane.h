// EagerLane: named operations that frameworks submit in any order from any thread, run
// in one order on all ranks.
//
// A thread with a communicator of its own sleeps until this rank submits something or a
// peer begins a round; it then exchanges news with all ranks (rounds.cc), lets the
// negotiation decide (negotiation.h) and runs what was decided. No cycle, no
// coordinator. A caller that waits anyway does all this itself (lane_drive.cc). A
// failure of the communicator fails everything pending and later, unless it has a
// succession: then the lane begins anew in the generation that follows, with all that
// is pending (lane_generation.cc).
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "engine/call/owner.h"
#include "engine/communicator/communicator.h"
#include "engine/communicator/succession.h"
#include "engine/eager/keys.h"
#include "engine/eager/negotiation.h"
#include "engine/eager/ticket.h"
#include "engine/eager/timeline.h"

namespace ringjax {

struct EagerOptions {
  uint64_t fusion_threshold = uint64_t{128} << 20;  // alike on all ranks
  size_t cache_capacity = 65536;                    // likewise
  double cycle_seconds = 0;  // how long news wait for more to fuse with
  double stall_warning = 30;
  double timeout = 300;  // seconds, 0 = never; both of waiting for other ranks
};

// An operation as it is handed in. `outs` are where results go, as many as tensors for
// allreduce, broadcast and reducescatter (maybe the inputs themselves). For allgather
// and alltoall none, or as many: a result that does not fit there is in memory of the
// core, as it is without. `rooms`: the bytes at outs; may be left out where the rank
// itself knows how many that must be.
struct EagerRequest {
  Submission what;
  std::vector<void*> ins, outs;
  std::vector<uint64_t> rooms;
  uint64_t stream = 0;   // of the device, if the tensors are there
  void* keep = nullptr;  // handed back by TakeEnded
  // Seconds of waiting for other ranks until an error, 0: never; negative: the lane's.
  double timeout = -1;
  // Whoever submits it waits for it at once, and may do the lane's work meanwhile.
  bool waits = false;
};

// Runs calls on tensors of a device. Mark, Abort and Close come from any thread, the
// others from the lane's.
class EagerBackend {
 public:
  virtual ~EagerBackend() = default;
  // Where the work of the submitter's stream is now: Run waits there before the tensors
  // are used. Also refuses what cannot be.
  virtual Result<std::shared_ptr<DevicePoint>> Mark(const EagerRequest& request) = 0;
  // Before each call, on all ranks: whether all of them can run any.
  virtual Status Open() = 0;
  // Memory on the device, filled with `pattern` again and again unless that is empty.
  virtual Result<std::shared_ptr<void>> Allocate(
      uint64_t bytes, std::span<const std::byte> pattern) = 0;
  // All ranks have agreed about the call. Returns when it is enqueued, `*end` is where
  // its tensors are free again; also after an error, if there is such a point.
  virtual Status Run(const Call& call,
                     std::span<const std::shared_ptr<DevicePoint>> marks,
                     std::shared_ptr<DevicePoint>* end) = 0;
  virtual void Abort(const Status& status) = 0;
  // Waits, not for ever, until what is enqueued is done; nothing is run any more.
  virtual void Finish() = 0;
  virtual void Close() = 0;  // when the lane's thread has ended, or lets go of it
};

// Makes one for a generation of the lane's communicator.
using EagerBackendMaker =
    std::function<std::shared_ptr<EagerBackend>(const std::shared_ptr<Communicator>&)>;

struct EagerStats {
  uint64_t rounds = 0, news_bytes = 0;          // news_bytes: of this rank
  uint64_t submissions = 0, cached = 0;         // cached: travelled as a number
  uint64_t calls = 0, fused = 0, failures = 0;  // fused: submissions in the calls
  // Submissions whose callers did the lane's work while they waited; and calls that
  // were left out, since their values had come beside the news.
  uint64_t driven = 0, beside = 0;
};

class EagerLane {
 public:
  // Nobody else may use `communicator`. One with a succession has been installed there,
  // and the lane follows it from one generation to the next: an operation that the loss
  // of a rank interrupts is done again by those that are left, as if it had just been
  // submitted. It is kUnavailable if it cannot be: a broadcast of a rank that is lost,
  // alltoall with splits, a reducescatter, and all there is when training starts again.
  EagerLane(std::shared_ptr<Communicator> communicator, EagerOptions options);
  ~EagerLane();

  // kInvalidArgument at once for what cannot be, or a name that is under way already;
  // after a failure, that. `keep` is the lane's only if this succeeds.
  Result<std::shared_ptr<Ticket>> Submit(EagerRequest request);
  // This rank has nothing more to submit until all others say so as well.
  Result<std::shared_ptr<Ticket>> Join();
  // Between the first two nobody is woken by what is submitted: it goes together, or
  // with a round that begins for another reason. May be nested; from any thread. Hurry:
  // somebody waits for what is held.
  void Hold() { held_.fetch_add(1, std::memory_order_acq_rel); }
  void Release();
  void Hurry();
  bool holds() const { return held_.load(std::memory_order_acquire) != 0; }

  // Fails everything pending and later; callable from any thread.
  void Abort(const Status& status);
  // The same, and ends the thread. Bounded; more than once has no effect.
  void Close();

  // What was kept for operations that have ended; the caller lets go of it.
  std::vector<void*> TakeEnded();
  bool has_ended() const { return has_ended_.load(std::memory_order_acquire); }

  // What runs calls on CUDA tensors. Before the first submission.
  void set_cuda(EagerBackendMaker make);
  std::shared_ptr<EagerBackend> cuda() const;  // null: nothing does
  // From the next round on, what happens is reported there; null: nowhere.
  void set_timeline(std::shared_ptr<Timeline> timeline);
  // Of the present generation.
  std::shared_ptr<Communicator> communicator() const;
  // Whether everything fails from now on; a generation that has ended is not the end.
  bool aborted() const;
  EagerStats stats() const;

 private:
  // A submission with all that only its own rank knows. The negotiation and its cache
  // hold it as what it describes; the rest is let go when it ends.
  struct Task : Submission {
    explicit Task(Submission what) : Submission(std::move(what)) {}
    std::vector<void*> ins, outs;
    std::vector<uint64_t> rooms;  // of EagerRequest
    std::shared_ptr<DevicePoint> mark;
    void* keep = nullptr;
    std::shared_ptr<Ticket> ticket;
    Clock::time_point since = Clock::now();
    uint64_t order = 0;       // among this rank's submissions
    uint64_t generation = 0;  // number of the one whose ranks `root` means
    double timeout = -1;      // of EagerRequest
    bool waits = false;       // likewise
  };
  using TaskPtr = std::shared_ptr<Task>;
  static constexpr char kJoin[] = "join";
  struct Batch;
  // Memory that grows to the largest batch with results in place, and stays.
  struct Scratch {
    std::unique_ptr<std::byte, void (*)(void*)> memory{nullptr, nullptr};
    uint64_t size = 0;
  };
  // What a rank waits for, and what has been said about it.
  struct Watched {
    Clock::time_point since;
    Patience patience = {};
    bool expired = false;
  };

  Status Check(const Submission& what, std::span<void* const> ins,
               std::span<void* const> outs, std::span<const uint64_t> rooms,
               const Communicator& present) const;
  Result<DevicePointPtr> Mark(const EagerRequest& request,
                              std::shared_ptr<EagerBackend>* backend) const;
  Status Enlist(const TaskPtr& task, const std::shared_ptr<EagerBackend>& backend);
  Status Named(const std::string& what, const Status& cause) const;

  // The thread.
  void Work();
  void Guarded(const std::function<void()>& body);
  Status Round();
  Status Carry(const Decision& decision, const Beside* values);
  void FailAll(const Status& cause);

  // Whoever has the wheel (lane_drive.cc).
  void Loop(std::unique_lock<std::mutex>* wheel);
  Status Turn(Clock::time_point until);
  void TakeIn();
  Status Gather();
  void StandAside(std::unique_lock<std::mutex>* wheel);
  void Recall();
  bool Drive(const Ticket& ticket);

  // Values beside the news (lane_beside.cc).
  Beside Offer() const;

  // Generations (lane_generation.cc).
  struct Inheritance;
  void HoldBack(bool* joins);
  bool MayContinue() const;
  Status Renew();
  Status Inherit(uint64_t since, Inheritance* all);
  Status Adapt(Task* task, const Succession::Change& change) const;
  void BeginAnew(const Inheritance& all);
  Status Seal();

  // Decisions (lane_execute.cc).
  Status Run(const Decision& decision, const Beside* values);
  Status Perform(const Decision& decision, const Beside* values, Batch* batch);
  Status OpenDevice(const Submission& first);
  Status Build(const Decision& decision, Batch* batch) const;
  Status AddFixed(const Ready& ready, size_t i, Batch* batch) const;
  Status AddRagged(const Ready& ready, size_t i, std::vector<Output>* outputs,
                   Batch* batch) const;
  Result<std::shared_ptr<void>> Allocate(const Submission& s, uint64_t bytes,
                                         std::span<const std::byte> pattern) const;
  Status MoveAside(Batch* batch);
  bool IsLost(const Status& status) const;
  Status Lost(const Decision& decision, const Status& status) const;

  // The timeline (lane_record.cc).
  NegotiationOptions ForNegotiation();
  Timeline::Row RowOf(const Submission& s) const;
  void RecordRun(const Decision& decision) const;
  void RecordEnd(const Decision& decision, const Status& status) const;
  // To the communicator's recorder: all have been ready since `agreed`.
  void Report(const std::vector<TaskPtr>& tasks, Clock::time_point agreed,
              const Status& status) const;

  // Stalls (lane_watch.cc).
  void Watch();
  struct Late {
    const Negotiation::Waiting* waiting;
    double seconds;
  };
  void Warn(const std::vector<Late>& late) const;
  bool LookAt(const Negotiation::Waiting& waiting, double seconds, Watched* w,
              std::vector<Late>* late);
  double LimitOf(const Negotiation::Waiting& waiting) const;
  std::vector<int> World(const std::vector<int>& ranks) const;
  std::string Tales(const std::vector<int>& ranks) const;

  // Ends tasks: all have the same status. `outputs` by task, or empty.
  // `end`: where a device comes to the end of them, or null.
  void Finish(const std::vector<TaskPtr>& tasks, const Status& status,
              std::vector<std::vector<Output>>* outputs,
              const std::shared_ptr<DevicePoint>& end = nullptr);
  void FinishJoin(const Status& status, int last_joined);
  TaskPtr Mine(const Ready& ready) const;

  const Owner owner_;
  const std::string origin_;  // prefix of the first generation's texts
  const std::shared_ptr<Succession> succession_;  // null: the first generation is all
  const EagerOptions options_;

  // Held by the one thread that does the lane's work, which "the thread" means below:
  // the lane's own, or a caller's. Before mutex_.
  std::mutex wheel_;
  // Callers that wait, ever; what the lane's own thread has seen of them.
  std::atomic<uint64_t> callers_{0};
  std::atomic<int> held_{0};          // Hold without Release, so many
  std::atomic<bool> hurried_{false};  // what is held must go all the same
  uint64_t callers_seen_ = 0;

  // Written by the thread with mutex_ held, so that it alone reads them without.
  std::shared_ptr<Communicator> communicator_;  // the generation that it is in
  std::shared_ptr<EagerBackend> cuda_;
  EagerBackendMaker make_cuda_;

  const std::shared_ptr<Gate> gate_;

  // Of the thread.
  std::shared_ptr<Timeline> recording_;  // in this round
  std::unique_ptr<Negotiation> negotiation_;
  uint64_t hits_before_ = 0;    // of earlier generations
  Scratch scratch_;             // for results in place
  bool sealed_ = false;         // all ranks are known to have heard this round
  std::vector<TaskPtr> taken_;  // from incoming_
  bool hurries_ = false;        // some that was taken has a limit of its own
  std::unordered_map<uint64_t, Watched> watched_;  // by Negotiation::Waiting::id
  Clock::time_point next_look_ = Clock::time_point::max();

  mutable std::mutex mutex_;  // guards all below
  bool aside_ = false;        // the lane's own thread has left the wheel to callers
  std::condition_variable recalled_;
  std::vector<TaskPtr> incoming_;
  bool joins_ = false;                                    // a join is incoming
  std::shared_ptr<Ticket> joined_;                        // of the join under way
  uint64_t join_generation_ = 0;                          // when it was said
  std::unordered_map<KeyView, TaskPtr, KeyHash> active_;  // submitted and not ended
  std::vector<void*> ended_;                              // kept for what has ended
  // What a device may still use, in the order of its work.
  std::deque<std::pair<std::shared_ptr<Ticket>, void*>> enqueued_;
  Status failure_;
  std::shared_ptr<Timeline> timeline_;
  EagerStats stats_;
  std::atomic<bool> has_ended_{false};
  std::mutex closing_;  // one after the other; before mutex_
  std::thread worker_;
};

}  // namespace ringjax
