// TaskQueue: the tasks of this rank that have not ended. Callers add tasks, on any
// thread; the holder of the progress lock takes them out and completes them.
#pragma once

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "base/status.h"
#include "engine/communicator/communicator.h"
#include "engine/communicator/resilient_comm.h"
#include "engine/eager/backend.h"
#include "engine/eager/ended_tasks.h"
#include "engine/eager/keys.h"
#include "engine/eager/lane_state.h"
#include "engine/eager/task.h"
#include "engine/eager/work.h"

namespace ringjax {

// All that the lane takes into its next epoch (progress_engine_epoch.cc).
struct Inheritance {
  std::vector<TaskPtr> tasks;  // sorted by Task::order
  bool joins = false;
  uint64_t join_epoch_index = 0;  // the epoch of the Join
};

// Owned by EagerLane. Any thread may call the first group of functions; only the holder
// of the progress lock calls the others.
class TaskQueue {
 public:
  TaskQueue(LaneState& state, EndedTasks& ended_tasks);

  // Threads wait here for the works of the lane.
  const std::shared_ptr<Gate>& gate() const { return gate_; }

  // All with LaneState::mutex held. Enlist puts the task into incoming_, for the
  // holder. `backend`: the one that recorded Task::mark, or null.
  Status Enlist(const TaskPtr& task, const std::shared_ptr<EagerBackend>& backend);
  // Enlists a join. `present`: the communicator of the caller's epoch.
  Status EnlistJoin(const std::shared_ptr<Work>& work, const Communicator& present);
  // Whether an operation or a join of this rank has not ended.
  bool pending() const { return !active_.empty() || joined_; }
  // Whether there are tasks that the holder has not taken.
  bool has_incoming() const { return !incoming_.empty(); }
  const Status& failure() const { return failure_; }  // ok until Fail

  // Moves the new tasks to `*taken`, which must be empty. Returns whether there is a
  // new join.
  bool Take(std::vector<TaskPtr>* taken);
  // Completes tasks, all with the same status. `outputs`: by task, or null. `end`: the
  // point at which the device has finished their work, or null.
  void Finish(const std::vector<TaskPtr>& tasks, const Status& status,
              std::vector<std::vector<Output>>* outputs,
              const std::shared_ptr<DevicePoint>& end = nullptr);
  void FinishJoin(const Status& status, int last_joined);
  // Refuses all later tasks, and returns those that have not ended.
  std::vector<TaskPtr> Fail(const Status& cause);

  // For the lane's own thread, with LaneState::mutex held: collects the tasks and the
  // join that were submitted up to that epoch, which begins.
  Inheritance Inherit(uint64_t epoch_index);

 private:
  LaneState& state_;                                   // its mutex guards all below
  const std::shared_ptr<Communicator>& communicator_;  // the lane's current epoch
  EndedTasks& ended_tasks_;
  const std::shared_ptr<Gate> gate_;

  std::vector<TaskPtr> incoming_;
  bool joins_ = false;             // a Join was submitted, not taken
  std::shared_ptr<Work> joined_;   // the pending Join, or null
  uint64_t join_epoch_index_ = 0;  // the epoch of that Join
  std::unordered_map<KeyView, TaskPtr, KeyHash> active_;  // submitted and not ended
  Status failure_;
};

}  // namespace ringjax
