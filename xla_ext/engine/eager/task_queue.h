// TaskQueue: holds the tasks of this rank that have not ended. Callers add tasks on any
// thread. The thread that holds the progress lock takes the tasks and completes them.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/status.h"
#include "engine/communicator/communicator.h"
#include "engine/communicator/resilient_comm.h"
#include "engine/eager/backend.h"
#include "engine/eager/keys.h"
#include "engine/eager/lane_state.h"
#include "engine/eager/task.h"
#include "engine/eager/work.h"

namespace ringjax {

// Returns kInvalidArgument if the ranks of `present` cannot run the operation, or if
// the memory does not fit the tensors. The error does not name the operation.
Status CheckTask(const Submission& what, std::span<void* const> ins,
                 std::span<void* const> outs, std::span<const uint64_t> rooms,
                 const Communicator& present);

// Stores the pointer EagerRequest::keep of each ended operation, until a caller takes
// the pointer and releases its target. Owned by an EagerLane. Any thread may call Take
// and any. Only TaskQueue::Finish calls the other functions.
class EndedTasks {
 public:
  // `mutex` is the mutex of LaneState.
  explicit EndedTasks(std::mutex& mutex) : mutex_(mutex) {}

  // Returns the stored pointers, except those whose memory a device may still use. The
  // caller must release their targets.
  std::vector<void*> Take();
  // Returns whether any pointer is stored, even one that Take does not return yet.
  // Takes no lock, so any() is cheap.
  bool any() const { return has_ended_.load(std::memory_order_acquire); }

  // The caller of each of the following functions must hold mutex_.
  void Reserve(size_t more) { ended_.reserve(ended_.size() + more); }  // before Add
  void Add(void* keep) { ended_.push_back(keep); }
  // Adds the pointer `keep` of an operation whose memory a device may still use.
  void AddEnqueued(const std::shared_ptr<Work>& work, void* keep) {
    enqueued_.emplace_back(work, keep);
  }
  // Updates the result of any().
  void Publish() {
    has_ended_.store(!ended_.empty() || !enqueued_.empty(), std::memory_order_release);
  }

 private:
  std::mutex& mutex_;  // guards all below
  std::vector<void*> ended_;
  // The Work and EagerRequest::keep of each operation whose memory a device may still
  // use, in the order in which the device runs the operations.
  std::deque<std::pair<std::shared_ptr<Work>, void*>> enqueued_;
  std::atomic<bool> has_ended_{false};
};

// The tasks, and the join if there is one, that continue in the next epoch.
struct PendingTasks {
  std::vector<TaskPtr> tasks;  // sorted by Task::order
  bool joins = false;
  uint64_t join_epoch_index = 0;  // the epoch of the Join
};

// The tasks of this rank that have not ended. Owned by an EagerLane.
class TaskQueue {
 public:
  TaskQueue(LaneState& state, EndedTasks& ended_tasks);

  // The mutex and condition variable on which threads wait for operations of the lane.
  const std::shared_ptr<Gate>& gate() const { return gate_; }

  // -- functions for any thread that holds LaneState::mutex --------------------------

  // Adds a task to the queue. `backend` is the backend that recorded Task::mark, or
  // null for host tensors.
  Status Enlist(const TaskPtr& task, const std::shared_ptr<EagerBackend>& backend);
  // Adds a join to the queue. `present` is the communicator of the caller's epoch.
  Status EnlistJoin(const std::shared_ptr<Work>& work, const Communicator& present);
  // Whether this rank has an operation or a join that has not ended.
  bool pending() const { return !active_.empty() || joined_; }
  // Whether there are tasks that the holder has not taken.
  bool has_incoming() const { return !incoming_.empty(); }
  const Status& failure() const { return failure_; }  // ok until Fail

  // -- functions for the thread that holds the progress lock -------------------------

  // Moves the queued tasks, except those of a later epoch, to `*taken`, which must be
  // empty. Returns whether a join was queued, too.
  bool Take(std::vector<TaskPtr>* taken);
  // Completes all `tasks` with `status`. `outputs` is null or has the outputs of each
  // task. `end` is the point at which the device has finished the tasks, or null
  // without a device.
  void Finish(std::span<const TaskPtr> tasks, const Status& status,
              std::vector<std::vector<Output>>* outputs,
              const std::shared_ptr<DevicePoint>& end = nullptr);
  void FinishJoin(const Status& status, int last_joined);
  // Makes every later Enlist fail with `cause`. Returns the tasks that have not ended.
  std::vector<TaskPtr> Fail(const Status& cause);

  // Returns the tasks and the join that are still pending when epoch `epoch_index`
  // begins, except those of a later epoch. Called by the lane's own thread, which also
  // holds LaneState::mutex.
  PendingTasks CollectPending(uint64_t epoch_index);

 private:
  LaneState& state_;                                   // its mutex guards all below
  const std::shared_ptr<Communicator>& communicator_;  // the lane's current epoch
  EndedTasks& ended_tasks_;
  const std::shared_ptr<Gate> gate_;

  std::vector<TaskPtr> incoming_;  // tasks that the holder has not taken
  bool joins_ = false;  // whether there is a join that the holder has not taken
  std::shared_ptr<Work> joined_;   // the work of the pending join, or null
  uint64_t join_epoch_index_ = 0;  // the epoch of the pending join
  std::unordered_map<KeyView, TaskPtr, KeyHash> active_;  // tasks that have not ended
  Status failure_;
};

}  // namespace ringjax
