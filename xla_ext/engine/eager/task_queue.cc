// Implements TaskQueue: adds tasks, hands them to the holder of the progress lock, and
// completes them. See task_queue.h.
#include "engine/eager/task_queue.h"

#include <algorithm>
#include <mutex>
#include <string>
#include <utility>

namespace ringjax {
namespace {

std::shared_ptr<Gate> MakeGate(const Communicator& c) {
  auto gate = std::make_shared<Gate>();
  gate->spin_seconds = c.options().spin_seconds;
  return gate;
}

}  // namespace

std::vector<void*> EndedTasks::Take() {
  std::lock_guard lock(mutex_);
  while (!enqueued_.empty()) {
    const Work& first = *enqueued_.front().first;
    if (!first.followed() && !first.passed()) break;
    ended_.push_back(enqueued_.front().second);
    enqueued_.pop_front();
  }
  has_ended_.store(!enqueued_.empty(), std::memory_order_relaxed);
  return std::exchange(ended_, {});
}

Status CheckTask(const Submission& what, std::span<void* const> ins,
                 std::span<void* const> outs, std::span<const uint64_t> rooms,
                 const Communicator& present) {
  auto invalid = [](const std::string& text) {
    return Status(Code::kInvalidArgument, text);
  };
  RJ_TRY(CheckSubmission(what, present.size()));
  const bool makes = what.op == Collective::kAllgather ||
                     what.op == Collective::kAlltoall ||
                     what.op == Collective::kBarrier;
  const bool places = !makes || !rooms.empty();
  if (ins.size() != what.tensors.size() || outs.size() != (places ? ins.size() : 0) ||
      (!rooms.empty() && rooms.size() != outs.size()))
    return invalid("inputs and results differ in number");
  for (size_t i = 0; i < ins.size(); ++i) {
    const Submission::Piece& piece = what.tensors[i];
    // If there are fewer rows than ranks, the last ranks receive no rows and need no
    // memory.
    const bool gets =
        what.op != Collective::kReducescatter || piece.dims[0] > present.rank();
    if (piece.bytes() > 0 &&
        (ins[i] == nullptr || (!makes && gets && outs[i] == nullptr)))
      return invalid("tensor " + std::to_string(i) + " has no memory");
    const uint64_t needed =
        makes ? 0 : ResultBytes(what, i, present.rank(), present.size());
    if (!makes && !rooms.empty() && rooms[i] != needed)
      return invalid("the result of tensor " + std::to_string(i) + " has " +
                     std::to_string(needed) + " bytes, and its place " +
                     std::to_string(rooms[i]));
  }
  return OkStatus();
}

TaskQueue::TaskQueue(LaneState& state, EndedTasks& ended_tasks)
    : state_(state),
      communicator_(state.communicator),
      ended_tasks_(ended_tasks),
      gate_(MakeGate(*communicator_)) {}

Status TaskQueue::Enlist(const TaskPtr& task,
                         const std::shared_ptr<EagerBackend>& backend) {
  const Communicator& here = *communicator_;
  if (!failure_.ok()) return WithContext(here.Prefix(), task->Describe(), failure_);
  if (here.epoch_index() > task->epoch_index) {
    // The epoch has changed since the last CheckTask, so check the task for the new
    // ranks.
    task->epoch_index = here.epoch_index();
    if (Status s = CheckTask(*task, task->ins, task->outs, task->rooms, here); !s.ok())
      return WithContext(here.Prefix(), task->Title(), s);
  }
  if (task->cuda && backend != state_.cuda)
    return WithContext(
        here.Prefix(), task->Describe(),
        {Code::kUnavailable,
         "ranks were lost just now, and NCCL with them; submit it again"});
  // Memory is reserved first, so that push_back cannot throw after the insertion into
  // active_.
  if (incoming_.size() == incoming_.capacity())
    incoming_.reserve(2 * incoming_.size() + 16);
  if (!active_.try_emplace(KeyView{task->op, task->name}, task).second)
    return WithContext(
        here.Prefix(), task->Title(),
        {Code::kInvalidArgument,
         "duplicate name: an operation of this name is still under way on "
         "this rank; wait for it, or give it another name"});
  incoming_.push_back(task);
  task->order = state_.stats.submissions;
  ++state_.stats.submissions;
  return OkStatus();
}

Status TaskQueue::EnlistJoin(const std::shared_ptr<Work>& work,
                             const Communicator& present) {
  if (!failure_.ok()) return state_.WithContext(kJoinTitle, failure_);
  if (joined_)
    return state_.WithContext(
        kJoinTitle, {Code::kInvalidArgument,
                     "duplicate: this rank has joined already and waits for the "
                     "others"});
  joined_ = work;
  joins_ = true;
  join_epoch_index_ = std::max(present.epoch_index(), communicator_->epoch_index());
  return OkStatus();
}

bool TaskQueue::Take(std::vector<TaskPtr>* taken) {
  std::lock_guard lock(state_.mutex);
  taken->swap(incoming_);
  bool joins = std::exchange(joins_, false);
  // Tasks and a join of a later epoch than the lane's current one stay in the queue.
  // The lane moves to that epoch soon, because its current epoch has been aborted.
  const uint64_t now = communicator_->epoch_index();
  if (state_.resilient->epoch_index() == now) return joins;
  joins_ = joins && join_epoch_index_ > now;
  const auto known = [now](const TaskPtr& task) { return task->epoch_index <= now; };
  const auto later = std::stable_partition(taken->begin(), taken->end(), known);
  incoming_.assign(later, taken->end());
  taken->erase(later, taken->end());
  return joins && !joins_;
}

void TaskQueue::Finish(std::span<const TaskPtr> tasks, const Status& status,
                       std::vector<std::vector<Output>>* outputs,
                       const std::shared_ptr<DevicePoint>& end) {
  {
    std::lock_guard lock(state_.mutex);
    ended_tasks_.Reserve(tasks.size());
    for (const TaskPtr& task : tasks) {
      active_.erase(KeyView{task->op, task->name});
      void* const keep = std::exchange(task->keep, nullptr);
      if (keep == nullptr) continue;
      if (end)
        ended_tasks_.AddEnqueued(WorkOf(task), keep);
      else
        ended_tasks_.Add(keep);
    }
    if (!status.ok()) state_.stats.failures += tasks.size();
    ended_tasks_.Publish();
  }
  {
    std::lock_guard lock(gate_->mutex);
    for (size_t i = 0; i < tasks.size(); ++i)
      tasks[i]->work.Complete(status, end,
                              outputs != nullptr ? &(*outputs)[i] : nullptr);
  }
  gate_->ended.notify_all();
  // The decision, or after a failure the negotiation, keeps the tasks alive. So the
  // data of each task are released here, and not by its destructor.
  for (const TaskPtr& task : tasks) {
    task->ins = task->outs = {};
    task->mark.reset();
  }
}

void TaskQueue::FinishJoin(const Status& status, int last_joined) {
  std::shared_ptr<Work> work;
  {
    std::lock_guard lock(state_.mutex);
    work.swap(joined_);
  }
  if (!work) return;
  {
    std::lock_guard lock(gate_->mutex);
    work->CompleteJoin(status, last_joined);
  }
  gate_->ended.notify_all();
}

std::vector<TaskPtr> TaskQueue::Fail(const Status& cause) {
  std::vector<TaskPtr> tasks;
  std::lock_guard lock(state_.mutex);
  failure_ = cause;
  incoming_.clear();
  for (const auto& [key, task] : active_) tasks.push_back(task);
  return tasks;
}

PendingTasks TaskQueue::CollectPending(uint64_t epoch_index) {
  // Tasks of a later epoch stay in incoming_.
  const auto ends = [&](const TaskPtr& task) {
    return task->epoch_index <= epoch_index;
  };
  PendingTasks all;
  for (const auto& [key, task] : active_)
    if (ends(task)) all.tasks.push_back(task);
  std::sort(all.tasks.begin(), all.tasks.end(),
            [](const TaskPtr& a, const TaskPtr& b) { return a->order < b->order; });
  std::erase_if(incoming_, ends);
  all.joins = joined_ && join_epoch_index_ <= epoch_index;
  if (!all.joins) return all;
  all.join_epoch_index = std::exchange(join_epoch_index_, epoch_index);
  joins_ = false;
  return all;
}

}  // namespace ringjax
