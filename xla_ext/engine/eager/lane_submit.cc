// Submission: callers, on any thread, put operations into the queue and wake the holder
// of the progress lock. See lane.h.
#include <utility>

#include "engine/eager/lane.h"

namespace ringjax {

Result<std::shared_ptr<Work>> EagerLane::Submit(EagerRequest request) {
  if (!owner_
           .IsHere())  // before any lock, which may be locked forever in a forked child
    return WithContext(
        origin_, request.what.Title(),
        {Code::kFailedPrecondition, "this process was forked after init()"});
  const auto present = communicator();
  if (Status s =
          CheckTask(request.what, request.ins, request.outs, request.rooms, *present);
      !s.ok())
    return WithContext(present->Prefix(), request.what.Title(), s);
  std::shared_ptr<EagerBackend> backend;
  auto mark = Mark(request, &backend);
  if (!mark.ok())
    return WithContext(present->Prefix(), request.what.Title(), mark.status());
  request.what.placed = !request.outs.empty();
  auto task = std::make_shared<Task>(std::move(request.what));
  task->ins = std::move(request.ins);
  task->outs = std::move(request.outs);
  task->rooms = std::move(request.rooms);
  task->mark = std::move(mark.value());
  task->timeout = request.timeout;
  task->waits = request.waits;
  task->epoch_index = present->epoch_index();
  // This thread keeps a reference of its own, because the lane may end the task and
  // release task->work as soon as the task is in the queue.
  const auto work = std::make_shared<Work>(tasks_.gate(), request.stream);
  task->work = work;
  std::shared_ptr<Communicator> here;
  {
    std::lock_guard lock(state_.mutex);
    RJ_TRY(tasks_.Enlist(task, backend));
    task->keep = request.keep;
    here = communicator_;
    if (!request.waits && !holds()) progress_lock_.Recall();
  }
  if (request.waits) {
    if (holds()) hurried_.store(true);
    progress_lock_.CountCaller();
    if (Drive(*work)) return work;
  }
  // seq_cst, as in Release. If this load comes before the fetch_sub of the last
  // Release, the task is already in the queue, and Release wakes the lane. Otherwise
  // this load sees that nothing is held, and this thread wakes the lane.
  if (request.waits || !held_.load(std::memory_order_seq_cst)) here->rounds().Wake();
  return work;
}

void EagerLane::Release() {
  if (held_.fetch_sub(1, std::memory_order_seq_cst) == 1) Hurry();
}

void EagerLane::Hurry() {
  if (!owner_.IsHere()) return;
  if (holds()) hurried_.store(true);
  std::shared_ptr<Communicator> here;
  {
    std::lock_guard lock(state_.mutex);
    here = communicator_;
    if (tasks_.has_incoming()) progress_lock_.Recall();
  }
  here->rounds().Wake();
}

// Records a point in the submitter's stream for tensors on a device
// (EagerBackend::Mark). Returns null for host tensors.
Result<DevicePointPtr> EagerLane::Mark(const EagerRequest& request,
                                       std::shared_ptr<EagerBackend>* backend) const {
  if (!request.what.cuda) return DevicePointPtr();
  *backend = cuda();
  if (*backend) return (*backend)->Mark(request);
  return Status(Code::kInvalidArgument,
                "CUDA tensors need a CUDA device on every rank, and NCCL");
}

Result<std::shared_ptr<Work>> EagerLane::Join() {
  if (!owner_.IsHere())
    return WithContext(origin_, kJoinTitle,
                       {Code::kFailedPrecondition, "this process was forked"});
  const auto present = communicator();
  auto work = std::make_shared<Work>(tasks_.gate());
  std::shared_ptr<Communicator> here;
  {
    std::lock_guard lock(state_.mutex);
    RJ_TRY(tasks_.EnlistJoin(work, *present));
    if (holds()) hurried_.store(true);
    here = communicator_;
    progress_lock_.Recall();
  }
  here->rounds().Wake();
  return work;
}

}  // namespace ringjax
