// EagerLane: named operations that frameworks submit in any order from any thread, run
// in one order on all ranks.
//
// The lane has a communicator and a thread. The thread sleeps until this rank submits
// an operation or a peer begins a round. It then exchanges negotiation messages with
// all ranks (engine/communicator/rounds.h), lets the negotiation decide (negotiation.h)
// and runs the decisions. There is no cycle and no coordinator. A caller that waits for
// its operation does this work itself (Drive). After a failure of the communicator, the
// lane starts again in the next epoch, with all pending operations
// (progress_engine_epoch.cc). If no epoch follows, all pending and later operations
// fail.
//
// The class itself has the functions that callers use, and the thread. Its parts:
// LaneState, which the parts share; TaskQueue, between the callers and the holder of
// the progress lock; ProgressLock, which says which thread is the holder;
// ProgressEngine, the work of the holder; EndedTasks and LaneRecord.
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
#include "engine/eager/ended_tasks.h"
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
  // No other code may use `communicator`. In an elastic job it has been installed in
  // its ResilientComm, and the lane follows the ResilientComm from epoch to epoch. An
  // operation that the loss of a rank interrupts runs again on the ranks that are left,
  // as if it had just been submitted. It fails with kUnavailable if that is impossible:
  // a broadcast whose root is lost, alltoall with splits, reducescatter, operations on
  // CUDA tensors, and all pending operations if the training starts again.
  EagerLane(std::shared_ptr<Communicator> communicator, EagerOptions options);
  ~EagerLane();

  // Submits an operation. Fails immediately with kInvalidArgument if the operation is
  // impossible or another one with its op and name has not ended on this rank, and with
  // the reason of the failure if the lane has failed. Takes `keep` only on success.
  Result<std::shared_ptr<Work>> Submit(EagerRequest request);
  // Declares that this rank submits nothing more until all ranks have joined.
  Result<std::shared_ptr<Work>> Join();
  // Between Hold and its Release, submissions wake no thread. They are sent together,
  // after the last Release or a Hurry, or with a round that begins for another reason.
  // Calls of Hold may be nested. Hurry is for a caller that waits for such a
  // submission.
  void Hold() { held_.fetch_add(1, std::memory_order_acq_rel); }
  void Release();
  void Hurry();
  bool holds() const { return held_.load(std::memory_order_acquire) != 0; }

  // Fails all pending and later operations.
  void Abort(const Status& status);
  // Aborts, and ends the thread in bounded time. Later calls have no effect.
  void Close();

  EndedTasks& ended_tasks() { return ended_tasks_; }
  LaneRecord& record() { return record_; }

  // Sets the backend for CUDA tensors. To be called before the first submission.
  void set_cuda(EagerBackendMaker make);
  std::shared_ptr<EagerBackend> cuda() const;  // null: there is none
  // The communicator of the current epoch.
  std::shared_ptr<Communicator> communicator() const;
  // Whether all operations fail from now on. The end of one epoch alone does not count.
  bool aborted() const;
  EagerStats stats() const;

 private:
  Result<DevicePointPtr> Mark(const EagerRequest& request,
                              std::shared_ptr<EagerBackend>* backend) const;

  // The main function of the lane's own thread. It runs Loop in each epoch. `progress`:
  // the progress lock.
  void ThreadMain();
  void Guarded(const std::function<void()>& body);
  void Loop(std::unique_lock<std::mutex>* progress);
  bool Drive(const Work& work);
  // Whether the next turn takes in submissions first.
  bool TakesIn() { return !holds() || hurried_.exchange(false); }

  const Owner owner_;
  const std::string origin_;  // Prefix() of the first epoch
  LaneState state_;
  const std::shared_ptr<Communicator>& communicator_ = state_.communicator;
  std::atomic<int> held_{0};          // calls of Hold without their Release
  std::atomic<bool> hurried_{false};  // the next turn takes in tasks despite Hold
  EndedTasks ended_tasks_{state_.mutex};
  TaskQueue tasks_{state_, ended_tasks_};
  LaneRecord record_{state_};
  ProgressLock progress_lock_{state_, tasks_};
  ProgressEngine engine_{state_, tasks_, record_};
  std::mutex closing_;  // serializes Close; acquired before LaneState::mutex
  std::thread worker_;
};

}  // namespace ringjax
