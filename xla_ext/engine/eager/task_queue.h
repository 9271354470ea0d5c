// TaskQueue: the tasks of this rank that have not ended. Callers add tasks on any
// thread. The holder of the progress lock takes the tasks out and completes them.
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

// Returns kInvalidArgument, without a title, if the operation is impossible in the
// epoch `present`, or if its memory does not fit its tensors.
Status CheckTask(const Submission& what, std::span<void* const> ins,
                 std::span<void* const> outs, std::span<const uint64_t> rooms,
                 const Communicator& present);

// Stores EagerRequest::keep of each operation that has ended, until a caller takes the
// pointer and releases its object. An EagerLane owns the object. Any thread may call
// Take and any. TaskQueue::Finish calls the other functions.
class EndedTasks {
 public:
  // `mutex`: LaneState::mutex.
  explicit EndedTasks(std::mutex& mutex) : mutex_(mutex) {}

  // Returns the stored pointers. The caller must release their objects.
  std::vector<void*> Take();
  // Returns whether Take may return a pointer. Needs no lock, so it is cheap.
  bool any() const { return has_ended_.load(std::memory_order_acquire); }

  // The caller of all following functions holds mutex_.
  void Reserve(size_t more) { ended_.reserve(ended_.size() + more); }  // before Add
  void Add(void* keep) { ended_.push_back(keep); }
  // Adds the pointer of a work whose memory a device may still use.
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
  // Works whose memory a device may still use, with their EagerRequest::keep, in the
  // order of the device's work.
  std::deque<std::pair<std::shared_ptr<Work>, void*>> enqueued_;
  std::atomic<bool> has_ended_{false};
};

// The operations that continue in the next epoch.
struct PendingTasks {
  std::vector<TaskPtr> tasks;  // sorted by Task::order
  bool joins = false;
  uint64_t join_epoch_index = 0;  // the epoch of the Join
};

// An EagerLane owns the object.
class TaskQueue {
 public:
  TaskQueue(LaneState& state, EndedTasks& ended_tasks);

  // The gate at which threads wait for the works of the lane.
  const std::shared_ptr<Gate>& gate() const { return gate_; }

  // -- for any thread that holds LaneState::mutex ------------------------------------

  // Puts the task into the queue for the holder. `backend` is the backend that recorded
  // Task::mark, or null.
  Status Enlist(const TaskPtr& task, const std::shared_ptr<EagerBackend>& backend);
  // Puts a join into the queue. `present`: the communicator of the caller's epoch.
  Status EnlistJoin(const std::shared_ptr<Work>& work, const Communicator& present);
  // Whether an operation or a join of this rank has not ended.
  bool pending() const { return !active_.empty() || joined_; }
  // Whether there are tasks that the holder has not taken.
  bool has_incoming() const { return !incoming_.empty(); }
  const Status& failure() const { return failure_; }  // ok until Fail

  // -- for the holder of the progress lock -------------------------------------------

  // Moves the new tasks to `*taken`, which must be empty. Returns whether there is a
  // new join.
  bool Take(std::vector<TaskPtr>* taken);
  // Completes tasks, all with one status. `outputs` has the outputs of each task, or is
  // null. `end` is the point at which the device has finished their work, or null.
  void Finish(const std::vector<TaskPtr>& tasks, const Status& status,
              std::vector<std::vector<Output>>* outputs,
              const std::shared_ptr<DevicePoint>& end = nullptr);
  void FinishJoin(const Status& status, int last_joined);
  // Returns the tasks that have not ended. All later tasks fail with `cause`.
  std::vector<TaskPtr> Fail(const Status& cause);

  // For the lane's own thread, which also holds LaneState::mutex. Returns the pending
  // tasks, and the pending join, that were submitted in an epoch up to `epoch_index`,
  // the epoch that begins.
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
