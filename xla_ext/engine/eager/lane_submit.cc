// Submission: what callers hand in, from any thread, until the lane's own has it. See
// lane.h.
#include <algorithm>
#include <utility>

#include "engine/eager/lane.h"

namespace ringjax {
namespace {

Status Shown(const std::string& prefix, const std::string& what, const Status& cause) {
  return Status(cause.code(), prefix + what + ": " + cause.message(), cause.rank());
}

}  // namespace

// Of the thread, or with mutex_ held.
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
    // Of few rows, the last ranks get none.
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

Result<std::shared_ptr<Ticket>> EagerLane::Submit(EagerRequest request) {
  if (!owner_.IsHere())  // and locks may be held for ever
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
  task->generation = succession_ ? present->generation() : 0;
  // Kept here: once the lane has the task, it may end it and forget the ticket.
  const auto ticket = std::make_shared<Ticket>(gate_);
  ticket->stream_ = request.stream;
  task->ticket = ticket;
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
    if (Drive(*ticket)) return ticket;
  }
  // In one order with Release: what it has not seen is not held any more.
  if (request.waits || !held_.load(std::memory_order_seq_cst)) here->Wake();
  return ticket;
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
  here->Wake();
}

// Where the submitter's stream is, for tensors on a device.
Result<DevicePointPtr> EagerLane::Mark(const EagerRequest& request,
                                       std::shared_ptr<EagerBackend>* backend) const {
  if (!request.what.cuda) return DevicePointPtr();
  *backend = cuda();
  if (*backend) return (*backend)->Mark(request);
  return Status(Code::kInvalidArgument,
                "CUDA tensors need a CUDA device on every rank, and NCCL");
}

// With mutex_ held: from here on the thread has the task.
Status EagerLane::Enlist(const TaskPtr& task,
                         const std::shared_ptr<EagerBackend>& backend) {
  const Communicator& here = *communicator_;
  if (!failure_.ok()) return Shown(here.Prefix(), task->Describe(), failure_);
  if (succession_ && here.generation() > task->generation) {
    // Ranks were lost while it was checked.
    task->generation = here.generation();
    if (Status s = Check(*task, task->ins, task->outs, task->rooms, here); !s.ok())
      return Shown(here.Prefix(), task->Title(), s);
  }
  if (task->cuda && backend != cuda_)
    return Shown(here.Prefix(), task->Describe(),
                 {Code::kUnavailable,
                  "ranks were lost just now, and NCCL with them; submit it again"});
  // First, so that nothing fails between the two that follow.
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

Result<std::shared_ptr<Ticket>> EagerLane::Join() {
  if (!owner_.IsHere())
    return Shown(origin_, kJoin,
                 {Code::kFailedPrecondition, "this process was forked"});
  const auto present = communicator();
  auto ticket = std::make_shared<Ticket>(gate_);
  std::shared_ptr<Communicator> here;
  {
    std::lock_guard lock(mutex_);
    if (!failure_.ok()) return Named(kJoin, failure_);
    if (joined_)
      return Named(kJoin, {Code::kInvalidArgument,
                           "duplicate: this rank has joined already and waits for the "
                           "others"});
    joined_ = ticket;
    joins_ = true;
    if (holds()) hurried_.store(true);
    here = communicator_;
    Recall();
    if (succession_)
      join_generation_ = std::max(present->generation(), here->generation());
  }
  here->Wake();
  return ticket;
}

}  // namespace ringjax
