// EagerLane: named operations that frameworks submit in any order from any thread, run
// in one order on all ranks.
//
// The lane has a communicator and a thread. The thread sleeps until this rank submits
// an operation or a peer begins a round. It then exchanges negotiation messages with
// all ranks (rounds.cc), lets the negotiation decide (negotiation.h) and runs the
// decisions. There is no cycle and no coordinator. A caller that waits for its
// operation does this work itself (lane_drive.cc). A failure of the communicator fails
// all pending and later operations, unless the communicator is resilient: then the lane
// starts again in the next epoch, with all pending operations (lane_epoch.cc).
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
#include "engine/communicator/resilient_comm.h"
#include "engine/eager/keys.h"
#include "engine/eager/negotiation.h"
#include "engine/eager/timeline.h"
#include "engine/eager/work.h"

namespace ringjax {

struct EagerOptions {
  uint64_t fusion_threshold = uint64_t{128} << 20;  // bytes; equal on all ranks
  size_t cache_capacity = 65536;                    // entries; equal on all ranks
  double cycle_seconds = 0;                         // seconds to wait for more to fuse
  // Seconds of waiting for other ranks until a warning and until an error; 0: never.
  double stall_warning = 30;
  double timeout = 300;
};

// An operation as its caller submits it. `outs` is the memory for the results. For
// allreduce, broadcast and reducescatter it has one address for each tensor, which may
// be that of the input. For allgather and alltoall it is empty or has one address for
// each tensor; a result whose size is not exactly that of its memory is then placed in
// memory of the core, as without `outs`. `rooms` is the number of bytes at each of
// `outs`. It may be empty for operations whose results have a known size.
struct EagerRequest {
  Submission what;
  std::vector<void*> ins, outs;
  std::vector<uint64_t> rooms;
  uint64_t stream = 0;   // stream of the submitter, for CUDA tensors
  void* keep = nullptr;  // returned by TakeEnded after the operation
  // Seconds of waiting for other ranks until an error; 0: never; negative: the lane's.
  double timeout = -1;
  // The caller waits for the operation at once, so Submit may do the work of the lane.
  bool waits = false;
};

// Runs calls on tensors of a device. Any thread may call Mark, Abort, Finish and Close;
// only the lane's own thread calls the other functions.
class EagerBackend {
 public:
  virtual ~EagerBackend() = default;
  // Records how far the submitter's stream has got: Run makes the device wait for that
  // point before it uses the tensors. Fails if this backend cannot run the operation.
  virtual Result<std::shared_ptr<DevicePoint>> Mark(const EagerRequest& request) = 0;
  // Connects the ranks the first time. All ranks call Open before each call.
  virtual Status Open() = 0;
  // Allocates memory on the device, filled with copies of `pattern` if that has bytes.
  virtual Result<std::shared_ptr<void>> Allocate(
      uint64_t bytes, std::span<const std::byte> pattern) = 0;
  // Enqueues a call about which all ranks have agreed. `marks`: the points that Mark
  // has returned for this rank's submissions in the call. `*end` becomes the point
  // after which the device no longer uses the tensors, also after an error if there is
  // such a point.
  virtual Status Run(const Call& call,
                     std::span<const std::shared_ptr<DevicePoint>> marks,
                     std::shared_ptr<DevicePoint>* end) = 0;
  virtual void Abort(const Status& status) = 0;
  // Waits a bounded time for the enqueued work. No call may follow.
  virtual void Finish() = 0;
  // Called after the lane's thread has ended, or when the lane leaves the epoch.
  virtual void Close() = 0;
};

// Makes the backend for one epoch of the lane's communicator.
using EagerBackendMaker =
    std::function<std::shared_ptr<EagerBackend>(const std::shared_ptr<Communicator>&)>;

struct EagerStats {
  uint64_t rounds = 0, message_bytes = 0;       // message_bytes: sent by this rank
  uint64_t submissions = 0, cached = 0;         // cached: sent as a number
  uint64_t calls = 0, fused = 0, failures = 0;  // fused: submissions in the calls
  // driven: submissions whose callers did the work of the lane while they waited.
  // piggybacked: calls that were left out, because their data came with the round.
  uint64_t driven = 0, piggybacked = 0;
};

// Any thread may call any public function.
class EagerLane {
 public:
  // No other code may use `communicator`. If it belongs to a ResilientComm, it has been
  // installed there, and the lane follows the ResilientComm from epoch to epoch. An
  // operation that the loss of a rank interrupts runs again on the ranks that are left,
  // as if it had just been submitted. It fails with kUnavailable if that is impossible:
  // a broadcast whose root is lost, alltoall with splits, reducescatter, operations on
  // CUDA tensors, and all pending operations if the training starts again.
  EagerLane(std::shared_ptr<Communicator> communicator, EagerOptions options);
  ~EagerLane();

  // Submits an operation. Fails at once with kInvalidArgument if the operation is
  // impossible or another one with its op and name has not ended on this rank, and with
  // the reason of the failure if the lane has failed. Takes `keep` only on success.
  Result<std::shared_ptr<Work>> Submit(EagerRequest request);
  // Declares that this rank submits nothing more until all ranks have joined.
  Result<std::shared_ptr<Work>> Join();
  // Between Hold and the last Release, a submission wakes no thread: all of them go
  // together, after that Release or Hurry, or with a round that begins for another
  // reason. Calls may be nested. Hurry is for a caller that waits for such a
  // submission.
  void Hold() { held_.fetch_add(1, std::memory_order_acq_rel); }
  void Release();
  void Hurry();
  bool holds() const { return held_.load(std::memory_order_acquire) != 0; }

  // Fails all pending and later operations.
  void Abort(const Status& status);
  // Aborts, and ends the thread in bounded time. Later calls have no effect.
  void Close();

  // Returns EagerRequest::keep of each operation that has ended. The caller releases
  // it.
  std::vector<void*> TakeEnded();
  bool has_ended() const { return has_ended_.load(std::memory_order_acquire); }

  // Sets the backend for CUDA tensors. To be called before the first submission.
  void set_cuda(EagerBackendMaker make);
  std::shared_ptr<EagerBackend> cuda() const;  // null: there is none
  // Reports events there from the next round on; null: nowhere.
  void set_timeline(std::shared_ptr<Timeline> timeline);
  // The communicator of the present epoch.
  std::shared_ptr<Communicator> communicator() const;
  // Whether all operations fail from now on. The end of one epoch alone does not count.
  bool aborted() const;
  EagerStats stats() const;

 private:
  // A submission with the data that only its own rank needs. Finish releases those
  // data.
  struct Task : Submission {
    explicit Task(Submission what) : Submission(std::move(what)) {}
    std::vector<void*> ins, outs;
    std::vector<uint64_t> rooms;  // see EagerRequest
    std::shared_ptr<DevicePoint> mark;
    void* keep = nullptr;
    std::shared_ptr<Work> work;
    Clock::time_point since = Clock::now();
    uint64_t order = 0;        // position among this rank's submissions
    uint64_t epoch_index = 0;  // the epoch to whose ranks `root` refers
    double timeout = -1;       // see EagerRequest
    bool waits = false;        // see EagerRequest
  };
  using TaskPtr = std::shared_ptr<Task>;
  static constexpr char kJoin[] = "join";
  struct Batch;
  // Memory that grows to the largest batch of results in place, and is kept.
  struct Scratch {
    std::unique_ptr<std::byte, void (*)(void*)> memory{nullptr, nullptr};
    uint64_t size = 0;
  };
  // An operation that waits for other ranks: since when, which warnings were printed,
  // and whether this rank has expired it.
  struct Watched {
    Clock::time_point since;
    StallPolicy stall_policy = {};
    bool expired = false;
  };

  Status Check(const Submission& what, std::span<void* const> ins,
               std::span<void* const> outs, std::span<const uint64_t> rooms,
               const Communicator& present) const;
  Result<DevicePointPtr> Mark(const EagerRequest& request,
                              std::shared_ptr<EagerBackend>* backend) const;
  Status Enlist(const TaskPtr& task, const std::shared_ptr<EagerBackend>& backend);
  Status Named(const std::string& what, const Status& cause) const;

  // The main loop and one round (lane.cc).
  void ThreadMain();
  void Guarded(const std::function<void()>& body);
  Status Round();
  Status Carry(const Decision& decision, const Piggyback* values);
  void FailAll(const Status& cause);

  // Progress, by the holder of the progress lock (lane_drive.cc).
  void Loop(std::unique_lock<std::mutex>* progress);
  Status Turn(Clock::time_point until);
  void TakeIn();
  Status Gather();
  void StandAside(std::unique_lock<std::mutex>* progress);
  void Recall();
  bool Drive(const Work& work);

  // Data that are sent with a round (lane_piggyback.cc).
  Piggyback Offer() const;

  // Epochs (lane_epoch.cc).
  struct Inheritance;
  void HoldBack(bool* joins);
  bool MayContinue() const;
  Status Renew();
  Status Inherit(uint64_t since, Inheritance* all);
  Status Adapt(Task* task, const ResilientComm::Change& change) const;
  void BeginAnew(const Inheritance& all);
  Status Seal();

  // Decisions (lane_execute.cc).
  Status Run(const Decision& decision, const Piggyback* values);
  Status Perform(const Decision& decision, const Piggyback* values, Batch* batch);
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
  // Adds the tasks to the communicator's recorder. `agreed`: when all ranks were ready;
  // not set: they never were.
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
  std::string ReplyTexts(const std::vector<int>& ranks) const;

  // Completes tasks, all with the same status. `outputs`: by task, or null. `end`: the
  // point at which the device has finished their work, or null.
  void Finish(const std::vector<TaskPtr>& tasks, const Status& status,
              std::vector<std::vector<Output>>* outputs,
              const std::shared_ptr<DevicePoint>& end = nullptr);
  void FinishJoin(const Status& status, int last_joined);
  TaskPtr Mine(const Ready& ready) const;  // null: this rank has not submitted it

  const Owner owner_;
  const std::string origin_;                        // Prefix() of the first epoch
  const std::shared_ptr<ResilientComm> resilient_;  // null: there is only one epoch
  const EagerOptions options_;

  // Its holder does the work of the lane: the lane's own thread, or a caller that
  // waits. "The holder" below is the thread that has this lock. Acquired before mutex_.
  std::mutex progress_lock_;
  // Number of callers that have waited so far; StandAside has seen callers_seen_.
  std::atomic<uint64_t> callers_{0};
  std::atomic<int> held_{0};          // calls of Hold without their Release
  std::atomic<bool> hurried_{false};  // take in submissions in spite of Hold
  uint64_t callers_seen_ = 0;

  // Written by the holder with mutex_ held (set_cuda writes before any submission), so
  // the holder may read them without mutex_.
  std::shared_ptr<Communicator> communicator_;  // the lane's present epoch
  std::shared_ptr<EagerBackend> cuda_;
  EagerBackendMaker make_cuda_;

  const std::shared_ptr<Gate> gate_;

  // Used by the holder only.
  std::shared_ptr<Timeline> recording_;  // timeline_ as of this round
  std::unique_ptr<Negotiation> negotiation_;
  uint64_t hits_before_ = 0;    // cache hits in earlier epochs
  Scratch scratch_;             // for MoveAside
  bool sealed_ = false;         // all ranks are known to have received this round
  std::vector<TaskPtr> taken_;  // from incoming_
  bool hurries_ = false;        // a task taken in has a timeout of its own
  std::unordered_map<uint64_t, Watched> watched_;  // by Negotiation::Waiting::id
  Clock::time_point next_look_ = Clock::time_point::max();

  mutable std::mutex mutex_;  // guards all below
  bool aside_ = false;        // the lane's own thread leaves the progress lock free
  std::condition_variable recalled_;
  std::vector<TaskPtr> incoming_;
  bool joins_ = false;                                    // a Join is not yet taken in
  std::shared_ptr<Work> joined_;                          // the pending Join, or null
  uint64_t join_epoch_index_ = 0;                         // the epoch of that Join
  std::unordered_map<KeyView, TaskPtr, KeyHash> active_;  // submitted and not ended
  std::vector<void*> ended_;                              // for TakeEnded
  // Works whose memory a device may still use, with their EagerRequest::keep, in the
  // order of the device's work.
  std::deque<std::pair<std::shared_ptr<Work>, void*>> enqueued_;
  Status failure_;
  std::shared_ptr<Timeline> timeline_;
  EagerStats stats_;
  std::atomic<bool> has_ended_{false};
  std::mutex closing_;  // serializes Close; acquired before mutex_
  std::thread worker_;
};

}  // namespace ringjax
