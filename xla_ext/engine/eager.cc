// Submission, the thread and its rounds, the end. See eager.h; how decisions are run is
// in eager_execute.cc, what is said about those who are late in eager_watch.cc.
#include "engine/eager.h"

#include <exception>
#include <utility>

namespace ringjax {
namespace {

std::shared_ptr<Gate> MakeGate(const Communicator& c) {
  auto gate = std::make_shared<Gate>();
  gate->spin_seconds = c.options().spin_seconds;
  return gate;
}

Clock::duration Seconds(double seconds) {
  return std::chrono::duration_cast<Clock::duration>(
      std::chrono::duration<double>(seconds));
}

constexpr char kJoin[] = "join";

// What must be done even if there is no memory just now.
template <typename F>
void Insist(F&& f) {
  while (true) {
    try {
      return f();
    } catch (const std::exception&) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
  }
}

}  // namespace

EagerLane::EagerLane(std::shared_ptr<Communicator> communicator, EagerOptions options)
    : communicator_(std::move(communicator)),
      options_(options),
      gate_(MakeGate(*communicator_)),
      negotiation_(ForNegotiation()) {
  worker_ = std::thread([this] { Work(); });
}

EagerLane::~EagerLane() {
  if (owner_.IsHere()) {
    Close();
  } else {  // a forked child: the thread is not here, and its handle cannot be let go
    [[maybe_unused]] auto* left_behind = new std::thread(std::move(worker_));
  }
}

void EagerLane::Abort(const Status& status) {
  if (!owner_.IsHere()) return;
  communicator_->Abort(status);
  if (cuda_) cuda_->Abort(status);
}

void EagerLane::Close() {
  if (!owner_.IsHere()) return;
  std::lock_guard lock(closing_);
  if (cuda_) cuda_->Finish();
  Abort(Status(Code::kUnavailable, "ringjax is shut down"));
  if (worker_.joinable()) worker_.join();
  if (cuda_) cuda_->Close();
}

// -- submission ----------------------------------------------------------------------

Status EagerLane::Named(const std::string& what, const Status& cause) const {
  return Status(cause.code(), communicator_->Prefix() + what + ": " + cause.message(),
                cause.rank());
}

Status EagerLane::Check(const EagerRequest& request) const {
  const Submission& what = request.what;
  auto invalid = [](const std::string& text) {
    return Status(Code::kInvalidArgument, text);
  };
  if (!owner_.IsHere())
    return Status(Code::kFailedPrecondition, "this process was forked after init()");
  RJ_TRY(CheckSubmission(what, communicator_->size()));
  if (what.cuda && !cuda_)
    return invalid("CUDA tensors need a CUDA device on every rank, and NCCL");
  const bool makes = what.op == Collective::kAllgather ||
                     what.op == Collective::kAlltoall ||
                     what.op == Collective::kBarrier;
  if (request.ins.size() != what.tensors.size() ||
      request.outs.size() != (makes ? 0 : request.ins.size()))
    return invalid("inputs and results differ in number");
  for (size_t i = 0; i < request.ins.size(); ++i) {
    const Submission::Piece& piece = what.tensors[i];
    // Of few rows, the last ranks get none.
    const bool gets =
        what.op != Collective::kReducescatter || piece.dims[0] > communicator_->rank();
    if (piece.bytes() > 0 &&
        (request.ins[i] == nullptr || (!makes && gets && request.outs[i] == nullptr)))
      return invalid("tensor " + std::to_string(i) + " has no memory");
  }
  return OkStatus();
}

Result<std::shared_ptr<Ticket>> EagerLane::Submit(EagerRequest request) {
  if (const Status status = Check(request); !status.ok())
    return Named(request.what.Title(), status);
  std::shared_ptr<DevicePoint> mark;
  if (request.what.cuda) {
    auto made = cuda_->Mark(request);
    if (!made.ok()) return Named(request.what.Title(), made.status());
    mark = std::move(made.value());
  }
  auto task = std::make_shared<Task>(std::move(request.what));
  task->ins = std::move(request.ins);
  task->outs = std::move(request.outs);
  task->mark = std::move(mark);
  // Kept here: once the lane has the task, it may end it and forget the ticket.
  const auto ticket = std::make_shared<Ticket>(gate_);
  ticket->stream_ = request.stream;
  task->ticket = ticket;
  {
    std::lock_guard lock(mutex_);
    if (!failure_.ok()) return Named(task->Describe(), failure_);
    // First, so that nothing fails between the two that follow.
    if (incoming_.size() == incoming_.capacity())
      incoming_.reserve(2 * incoming_.size() + 16);
    if (!active_.try_emplace(KeyView{task->op, task->name}, task).second)
      return Named(task->Title(),
                   {Code::kInvalidArgument,
                    "duplicate name: an operation of this name is still under way on "
                    "this rank; wait for it, or give it another name"});
    incoming_.push_back(task);
    task->keep = request.keep;
    ++stats_.submissions;
  }
  communicator_->Wake();
  return ticket;
}

Result<std::shared_ptr<Ticket>> EagerLane::Join() {
  auto ticket = std::make_shared<Ticket>(gate_);
  {
    std::lock_guard lock(mutex_);
    if (!owner_.IsHere())
      return Named(kJoin, {Code::kFailedPrecondition, "this process was forked"});
    if (!failure_.ok()) return Named(kJoin, failure_);
    if (joined_)
      return Named(kJoin, {Code::kInvalidArgument,
                           "duplicate: this rank has joined already and waits for the "
                           "others"});
    joined_ = ticket;
    joins_ = true;
  }
  communicator_->Wake();
  return ticket;
}

std::vector<void*> EagerLane::TakeEnded() {
  std::lock_guard lock(mutex_);
  while (!enqueued_.empty()) {
    const Ticket& first = *enqueued_.front().first;
    if (!first.followed() && !first.passed()) break;
    ended_.push_back(enqueued_.front().second);
    enqueued_.pop_front();
  }
  has_ended_.store(!enqueued_.empty(), std::memory_order_relaxed);
  return std::exchange(ended_, {});
}

EagerStats EagerLane::stats() const {
  std::lock_guard lock(mutex_);
  return stats_;
}

// -- the thread ----------------------------------------------------------------------

void EagerLane::Work() {
  try {
    if (Loop().ok()) return;
  } catch (const std::exception& e) {  // out of memory, most likely: peers must know
    Insist([&] {
      communicator_->GiveUp(Code::kInternal, std::string("failed: ") + e.what());
    });
  }
  // Whatever ends the loop has aborted the communicator: all ranks give this reason.
  Insist([this] {
    const Status cause = communicator_->abort_status();
    if (cuda_) cuda_->Abort(cause);
    FailAll(cause);
  });
}

Status EagerLane::Loop() {
  while (true) {
    TakeIn();
    if (Clock::now() >= next_look_) Watch();
    if (negotiation_.HasNews()) {
      RJ_TRY(Gather());
      RJ_TRY(Round());
      continue;
    }
    bool called = false, needed;
    {
      std::lock_guard lock(mutex_);
      needed = !active_.empty() || joined_;
    }
    RJ_TRY(communicator_->Await(next_look_, needed, &called));
    if (!called) continue;
    TakeIn();
    RJ_TRY(Round());
  }
}

void EagerLane::TakeIn() {
  bool joins;
  {
    std::lock_guard lock(mutex_);
    taken_.swap(incoming_);
    joins = std::exchange(joins_, false);
  }
  for (const TaskPtr& task : taken_) negotiation_.Submit(task);
  taken_.clear();
  if (joins) negotiation_.Join();
}

// Waits for more to fuse with, unless a peer does not want to wait.
Status EagerLane::Gather() {
  if (options_.cycle_seconds <= 0) return OkStatus();
  const auto until = Clock::now() + Seconds(options_.cycle_seconds);
  for (bool called = false; !called && Clock::now() < until;) {
    RJ_TRY(communicator_->Await(until, true, &called));
    TakeIn();
  }
  return OkStatus();
}

Status EagerLane::Round() {
  {
    std::lock_guard lock(mutex_);
    recording_ = timeline_;
  }
  if (recording_) recording_->Round();
  const std::string news = negotiation_.TakeNews();
  std::vector<std::string> messages;
  RJ_TRY(communicator_->Exchange(news, &messages));
  std::vector<Decision> decisions;
  if (Status s = negotiation_.Receive(messages, &decisions); !s.ok()) {
    communicator_->GiveUp(s.code(), s.message(), s.rank());
    return s;
  }
  {
    std::lock_guard lock(mutex_);
    ++stats_.rounds;
    stats_.news_bytes += news.size();
    stats_.cached = negotiation_.hits();
  }
  for (const Decision& decision : decisions) RJ_TRY(Carry(decision));
  if (negotiation_.pending() > 0 && next_look_ == Clock::time_point::max())
    next_look_ = Clock::now();
  return OkStatus();
}

Status EagerLane::Carry(const Decision& decision) {
  switch (decision.kind) {
    case Decision::Kind::kRun:
      return Run(decision);
    case Decision::Kind::kFail:
      RecordEnd(decision, decision.status);
      if (const TaskPtr task = Mine(decision.fused[0]))
        Finish({task}, decision.status, nullptr);
      break;
    case Decision::Kind::kJoined:
      FinishJoin(OkStatus(), decision.last_joined);
      break;
  }
  return OkStatus();
}

EagerLane::TaskPtr EagerLane::Mine(const Ready& ready) const {
  // What Submit was given is what comes back, and all of them are tasks.
  return std::const_pointer_cast<Task>(std::static_pointer_cast<const Task>(
      ready.by_rank[static_cast<size_t>(communicator_->rank())]));
}

void EagerLane::Finish(const std::vector<TaskPtr>& tasks, const Status& status,
                       std::vector<std::vector<Output>>* outputs,
                       const std::shared_ptr<DevicePoint>& end) {
  {
    std::lock_guard lock(mutex_);
    ended_.reserve(ended_.size() + tasks.size());
    for (const TaskPtr& task : tasks) {
      active_.erase(KeyView{task->op, task->name});
      void* const keep = std::exchange(task->keep, nullptr);
      if (keep == nullptr) continue;
      if (end)
        enqueued_.emplace_back(task->ticket, keep);
      else
        ended_.push_back(keep);
    }
    if (!status.ok()) stats_.failures += tasks.size();
    has_ended_.store(!ended_.empty() || !enqueued_.empty(), std::memory_order_release);
  }
  {
    std::lock_guard lock(gate_->mutex);
    for (size_t i = 0; i < tasks.size(); ++i) {
      Ticket& ticket = *tasks[i]->ticket;
      ticket.status_ = status;
      ticket.end_ = end;
      if (outputs != nullptr) ticket.outputs_ = std::move((*outputs)[i]);
      ticket.done_.store(true, std::memory_order_release);
    }
  }
  gate_->ended.notify_all();
  for (const TaskPtr& task : tasks) {  // the cache may hold it for long
    task->ticket.reset();
    task->ins = task->outs = {};
    task->mark.reset();
  }
}

void EagerLane::FinishJoin(const Status& status, int last_joined) {
  std::shared_ptr<Ticket> ticket;
  {
    std::lock_guard lock(mutex_);
    ticket.swap(joined_);
  }
  if (!ticket) return;
  {
    std::lock_guard lock(gate_->mutex);
    ticket->status_ = status;
    ticket->last_joined_ = last_joined;
    ticket->done_.store(true, std::memory_order_release);
  }
  gate_->ended.notify_all();
}

void EagerLane::FailAll(const Status& cause) {
  std::vector<TaskPtr> tasks;
  {
    std::lock_guard lock(mutex_);
    failure_ = cause;
    incoming_.clear();
    for (const auto& [key, task] : active_) tasks.push_back(task);
  }
  for (const TaskPtr& task : tasks)
    Finish({task}, Named(task->Describe(), cause), nullptr);
  FinishJoin(Named(kJoin, cause), -1);
}

}  // namespace ringjax
