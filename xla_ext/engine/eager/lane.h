// EagerLane: runs named operations in one order on all ranks, although frameworks
// submit them in any order from any thread.
//
// The lane has a communicator and a thread. The thread sleeps until this rank submits
// an operation or a peer begins a round. Then the thread exchanges negotiation messages
// with all ranks (engine/communicator/rounds.h), passes the messages to the negotiation
// (negotiation.h) and carries out the decisions. Unlike Horovod's background thread, it
// needs no fixed cycle and no coordinator. A caller that waits for its operation does
// this work on its own thread (Drive). After a failure of the communicator, the lane
// submits all pending operations again in the next epoch. If no epoch follows, all
// pending and later operations fail.
//
// EagerLane itself has the functions that callers use, and the thread. Its members are:
//
//   LaneState       what the other members share: communicator, options, mutex
//   TaskQueue       hands tasks from callers to the holder of the progress lock
//   ProgressLock    decides which thread is the holder
//   ProgressEngine  does the work of the holder: rounds, calls, the next epoch
//   EndedTasks      keeps the pointers of ended operations until callers release them
//   LaneRecord      reports operations to the recorder and to a timeline
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "engine/call/owner.h"
#include "engine/communicator/communicator.h"
#include "engine/communicator/resilient_comm.h"
#include "engine/eager/backend.h"
#include "engine/eager/lane_record.h"
#include "engine/eager/lane_state.h"
#include "engine/eager/progress_engine.h"
#include "engine/eager/progress_lock.h"
#include "engine/eager/task_queue.h"
#include "engine/eager/work.h"

namespace ringjax {

// Any thread may call any public function.
class EagerLane {
 public:
  // No other code may use `communicator`. In an elastic job, `communicator` must
  // already be installed in its ResilientComm, which the lane follows from epoch to
  // epoch. An operation that the loss of a rank interrupts runs again on the remaining
  // ranks, as if it had just been submitted. Operations that cannot run again fail with
  // kUnavailable: a broadcast whose root is lost, an alltoall with splits, a
  // reducescatter, an operation on CUDA tensors, and all pending operations if training
  // restarts.
  EagerLane(std::shared_ptr<Communicator> communicator, EagerOptions options);
  ~EagerLane();

  // Submits an operation. Fails immediately with kInvalidArgument if the operation is
  // impossible, or if an earlier operation with the same op and name has not ended on
  // this rank. If the lane has failed, returns the error that made it fail. Takes
  // ownership of `request.keep` only on success.
  Result<std::shared_ptr<Work>> Submit(EagerRequest&& request);
  // Declares that this rank submits nothing more until all ranks have joined.
  Result<std::shared_ptr<Work>> Join();
  // Between Hold and Release, submissions are held and wake no thread. Held submissions
  // are sent together, after the last Release or a Hurry, or with a round that begins
  // for another reason. Calls of Hold may be nested. A caller that waits for a held
  // submission must call Hurry.
  void Hold() { held_.fetch_add(1, std::memory_order_acq_rel); }
  void Release();
  void Hurry();
  bool holds() const { return held_.load(std::memory_order_acquire) != 0; }

  // Makes all pending and later operations fail with `status`.
  void Abort(const Status& status);
  // Aborts the lane and ends its thread within limited time. Later calls do nothing.
  void Close();

  EndedTasks& ended_tasks() { return ended_tasks_; }
  LaneRecord& record() { return record_; }

  // Sets the backend for CUDA tensors. Must be called before the first submission.
  void set_cuda(EagerBackendMaker make);
  std::shared_ptr<EagerBackend> cuda() const;  // null if there is none
  // Returns the communicator of the current epoch.
  std::shared_ptr<Communicator> communicator() const;
  // Whether the lane has failed permanently. False if an epoch has failed and the next
  // follows.
  bool aborted() const;
  EagerStats stats() const { return state_.stats; }

 private:
  Result<DevicePointPtr> Mark(const EagerRequest& request,
                              std::shared_ptr<EagerBackend>* backend) const;

  void ThreadMain();  // the main function of the lane's own thread
  template <typename Body>
  void Guarded(const Body& body);
  // Runs the lane until the epoch ends. `progress` is the progress lock.
  void RunEpoch(std::unique_lock<std::mutex>* progress);
  bool Drive(const Task& task);
  void Wake();
  // Returns whether the next Turn takes submissions from the queue: nothing is held, or
  // Hurry was called.
  bool TakesSubmissions() { return !holds() || hurried_.exchange(false); }

  const Owner owner_;
  const std::string origin_;  // Prefix() of the first epoch
  LaneState state_;
  const std::shared_ptr<Communicator>& communicator_ = state_.communicator;
  std::atomic<int> held_{0};          // calls of Hold without their Release
  std::atomic<bool> hurried_{false};  // whether the next turn ignores Hold
  EndedTasks ended_tasks_{state_.mutex};
  TaskQueue tasks_{state_, ended_tasks_};
  LaneRecord record_{state_};
  ProgressLock progress_lock_{state_, tasks_};
  ProgressEngine engine_{state_, tasks_, record_};
  std::mutex closing_;  // serializes Close; acquired before LaneState::mutex
  std::thread worker_;
};

}  // namespace ringjax
