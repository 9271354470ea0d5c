// Submission: operations on their way from the callers, on any thread, to the holder of
// the progress lock. See lane.h.
#include <algorithm>
#include <utility>

#include "engine/eager/lane.h"

namespace ringjax {
namespace {

Status Shown(const std::string& prefix, const std::string& what, const Status& cause) {
  return Status(cause.code(), prefix + what + ": " + cause.message(), cause.rank());
}

}  // namespace

// Adds the prefix and `what` to an error. With the progress lock or mutex_ held.
Status EagerLane::Named(const std::string& what, const Status& cause) const {
  return Shown(communicator_->Prefix(), what, cause);
}

Status EagerLane::Check(const Submission& what, std::span<void* const> ins,
                        std::span<void* const> outs, std::span<const uint64_t> rooms,
                        const Communicator& present) const {
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
    // If there are fewer rows than ranks, the last ranks get none.
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

Result<std::shared_ptr<Work>> EagerLane::Submit(EagerRequest request) {
  if (!owner_.IsHere())  // before any lock, which may be held for ever here
    return Shown(origin_, request.what.Title(),
                 {Code::kFailedPrecondition, "this process was forked after init()"});
  const auto present = communicator();
  if (Status s =
          Check(request.what, request.ins, request.outs, request.rooms, *present);
      !s.ok())
    return Shown(present->Prefix(), request.what.Title(), s);
  std::shared_ptr<EagerBackend> backend;
  auto mark = Mark(request, &backend);
  if (!mark.ok()) return Shown(present->Prefix(), request.what.Title(), mark.status());
  request.what.placed = !request.outs.empty();
  auto task = std::make_shared<Task>(std::move(request.what));
  task->ins = std::move(request.ins);
  task->outs = std::move(request.outs);
  task->rooms = std::move(request.rooms);
  task->mark = std::move(mark.value());
  task->timeout = request.timeout;
  task->waits = request.waits;
  task->epoch_index = resilient_ ? present->epoch_index() : 0;
  // This thread keeps a reference of its own: as soon as the task is in incoming_, the
  // lane may end the task and drop task->work.
  const auto work = std::make_shared<Work>(gate_);
  work->stream_ = request.stream;
  task->work = work;
  std::shared_ptr<Communicator> here;
  {
    std::lock_guard lock(mutex_);
    RJ_TRY(Enlist(task, backend));
    task->keep = request.keep;
    here = communicator_;
    if (!request.waits && !holds()) Recall();
  }
  if (request.waits) {
    if (holds()) hurried_.store(true);
    callers_.fetch_add(1, std::memory_order_relaxed);
    if (Drive(*work)) return work;
  }
  // seq_cst, pairs with Release. If this load comes before the fetch_sub of Release,
  // that Release wakes the lane after the task has been put into incoming_. Otherwise
  // this load sees that nothing is held. So one of the two wakes the lane.
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
    std::lock_guard lock(mutex_);
    here = communicator_;
    if (!incoming_.empty()) Recall();
  }
  here->rounds().Wake();
}

// For tensors on a device, records how far the submitter's stream has got; else null.
Result<DevicePointPtr> EagerLane::Mark(const EagerRequest& request,
                                       std::shared_ptr<EagerBackend>* backend) const {
  if (!request.what.cuda) return DevicePointPtr();
  *backend = cuda();
  if (*backend) return (*backend)->Mark(request);
  return Status(Code::kInvalidArgument,
                "CUDA tensors need a CUDA device on every rank, and NCCL");
}

// Puts the task into incoming_, for the holder of the progress lock. With mutex_ held.
Status EagerLane::Enlist(const TaskPtr& task,
                         const std::shared_ptr<EagerBackend>& backend) {
  const Communicator& here = *communicator_;
  if (!failure_.ok()) return Shown(here.Prefix(), task->Describe(), failure_);
  if (resilient_ && here.epoch_index() > task->epoch_index) {
    // The epoch has changed since Check: check again for the new ranks.
    task->epoch_index = here.epoch_index();
    if (Status s = Check(*task, task->ins, task->outs, task->rooms, here); !s.ok())
      return Shown(here.Prefix(), task->Title(), s);
  }
  if (task->cuda && backend != cuda_)
    return Shown(here.Prefix(), task->Describe(),
                 {Code::kUnavailable,
                  "ranks were lost just now, and NCCL with them; submit it again"});
  // Reserves first, so that push_back cannot throw after the insertion into active_.
  if (incoming_.size() == incoming_.capacity())
    incoming_.reserve(2 * incoming_.size() + 16);
  if (!active_.try_emplace(KeyView{task->op, task->name}, task).second)
    return Shown(here.Prefix(), task->Title(),
                 {Code::kInvalidArgument,
                  "duplicate name: an operation of this name is still under way on "
                  "this rank; wait for it, or give it another name"});
  incoming_.push_back(task);
  task->order = stats_.submissions++;
  return OkStatus();
}

Result<std::shared_ptr<Work>> EagerLane::Join() {
  if (!owner_.IsHere())
    return Shown(origin_, kJoin,
                 {Code::kFailedPrecondition, "this process was forked"});
  const auto present = communicator();
  auto work = std::make_shared<Work>(gate_);
  std::shared_ptr<Communicator> here;
  {
    std::lock_guard lock(mutex_);
    if (!failure_.ok()) return Named(kJoin, failure_);
    if (joined_)
      return Named(kJoin, {Code::kInvalidArgument,
                           "duplicate: this rank has joined already and waits for the "
                           "others"});
    joined_ = work;
    joins_ = true;
    if (holds()) hurried_.store(true);
    here = communicator_;
    Recall();
    if (resilient_)
      join_epoch_index_ = std::max(present->epoch_index(), here->epoch_index());
  }
  here->rounds().Wake();
  return work;
}

}  // namespace ringjax
