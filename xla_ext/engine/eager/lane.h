// EagerLane: runs named operations in one order on all ranks, although frameworks
// submit them in any order from any thread.
//
// The lane has a communicator and a thread. The thread sleeps until this rank submits
// an operation or a peer begins a round. It then exchanges negotiation messages with
// all ranks (engine/communicator/rounds.h), passes the messages to the negotiation
// (negotiation.h) and carries out its decisions. Unlike Horovod's, the lane has no
// cycle time and no coordinator. A caller that waits for its operation does this work
// itself (Drive). After a failure of the communicator, the lane starts again in the
// next epoch, with all pending operations. If no epoch
// follows, all pending and later operations fail.
//
// The class itself has the functions that callers use, and the thread. Its parts are:
//
//   LaneState       the state that the parts share
//   TaskQueue       the tasks between the callers and the holder of the progress lock
//   ProgressLock    which thread is the holder
//   ProgressEngine  the work of the holder
//   EndedTasks      pointers of ended operations, which callers release
//   LaneRecord      reports to the recorder and to a timeline
#pragma once

#include <atomic>
#include <functional>
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
  // No other code may use `communicator`. In an elastic job it must have been installed
  // in its ResilientComm, and the lane follows the ResilientComm from epoch to epoch.
  // An operation that the loss of a rank interrupts runs again on the remaining ranks,
  // as if it had just been submitted. It fails with kUnavailable if that is impossible:
  // for a broadcast whose root is lost, an alltoall with splits, a reducescatter, an
  // operation on CUDA tensors, and for all pending operations if the training starts
  // again.
  EagerLane(std::shared_ptr<Communicator> communicator, EagerOptions options);
  ~EagerLane();

  // Submits an operation. Fails immediately with kInvalidArgument if the operation is
  // impossible, or if an operation of the same op and name has not ended on this rank.
  // Fails with the reason of the failure if the lane has failed. Takes over `keep` only
  // on success.
  Result<std::shared_ptr<Work>> Submit(EagerRequest request);
  // Declares that this rank submits nothing more until all ranks have joined.
  Result<std::shared_ptr<Work>> Join();
  // Between Hold and its Release, submissions wake no thread. They are sent together,
  // after the last Release or a Hurry, or with a round that begins for another reason.
  // Calls of Hold may be nested. A caller that must wait for a held submission calls
  // Hurry.
  void Hold() { held_.fetch_add(1, std::memory_order_acq_rel); }
  void Release();
  void Hurry();
  bool holds() const { return held_.load(std::memory_order_acquire) != 0; }

  // Fails all pending and later operations.
  void Abort(const Status& status);
  // Aborts, and ends the thread in limited time. Later calls do nothing.
  void Close();

  EndedTasks& ended_tasks() { return ended_tasks_; }
  LaneRecord& record() { return record_; }

  // Sets the backend for CUDA tensors. Must be called before the first submission.
  void set_cuda(EagerBackendMaker make);
  std::shared_ptr<EagerBackend> cuda() const;  // null if there is none
  // The communicator of the current epoch.
  std::shared_ptr<Communicator> communicator() const;
  // Whether the lane has failed for good. False if only one epoch has ended.
  bool aborted() const;
  EagerStats stats() const;

 private:
  Result<DevicePointPtr> Mark(const EagerRequest& request,
                              std::shared_ptr<EagerBackend>* backend) const;

  void ThreadMain();  // the main function of the lane's own thread
  void Guarded(const std::function<void()>& body);
  // Does the work of the lane until the epoch ends. `progress` is the progress lock.
  void RunEpoch(std::unique_lock<std::mutex>* progress);
  bool Drive(const Work& work);
  // Returns whether the next turn begins with the submissions in the queue.
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
