// Implements EagerLane: submissions, the lane's own thread, callers that run the lane
// while they wait, and the end of the lane. See lane.h.
#include "engine/eager/lane.h"

#include <chrono>
#include <exception>
#include <utility>

#include "engine/call/waiter.h"

namespace ringjax {
namespace {

// The longest time for which a caller runs the eager lane. Then the lane's own thread
// takes over, and the caller checks for signals while it waits.
constexpr auto kLongestTurn = std::chrono::milliseconds(100);
// Seconds without progress after which a signal may interrupt ProgressEngine::Turn.
// Such an interrupt aborts the communicator, because Turn may be in the middle of a
// round. So a signal must not interrupt Turn while data still move.
constexpr double kInterruptAfter = 2;

// Calls `f` until it throws no exception, for steps that must succeed even if the
// process is out of memory for a while.
template <typename F>
void RetryUntilDone(F&& f) {
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
    : origin_(communicator->Prefix()), state_(std::move(communicator), options) {
  worker_ = std::thread([this] { ThreadMain(); });
}

EagerLane::~EagerLane() {
  if (owner_.IsHere()) {
    Close();
  } else {
    // In a forked child the thread does not exist, but destroying a joinable
    // std::thread would terminate the process. So the std::thread is leaked.
    [[maybe_unused]] auto* left_behind = new std::thread(std::move(worker_));
  }
}

void EagerLane::Abort(const Status& status) {
  if (!owner_.IsHere()) return;
  // This thread calls End first and then reads the communicator.
  // ProgressEngine::MoveToNextEpoch does the opposite: it writes the communicator with
  // the mutex held, and then reads end_status(). So if both functions run at the same
  // time, at least one of them aborts the new communicator.
  state_.resilient->End(status);
  std::shared_ptr<Communicator> here;
  {
    std::lock_guard lock(state_.mutex);
    here = communicator_;
  }
  here->Abort(status);
  if (const auto backend = cuda()) backend->Abort(status);
}

void EagerLane::Close() {
  if (!owner_.IsHere()) return;
  std::lock_guard lock(closing_);
  if (const auto backend = cuda()) backend->Finish();
  Abort(Status(Code::kUnavailable, "ringjax is shut down"));
  if (worker_.joinable()) worker_.join();
  if (state_.cuda) state_.cuda->Close();
}

void EagerLane::set_cuda(EagerBackendMaker make) {
  auto made = make(communicator());
  std::lock_guard lock(state_.mutex);
  state_.make_cuda = std::move(make);
  state_.cuda = std::move(made);
}

std::shared_ptr<EagerBackend> EagerLane::cuda() const {
  std::lock_guard lock(state_.mutex);
  return state_.cuda;
}

std::shared_ptr<Communicator> EagerLane::communicator() const {
  if (!state_.resilient->repairs()) return communicator_;  // needs no lock
  if (auto present = state_.resilient->current()) return present;
  std::lock_guard lock(state_.mutex);  // the ResilientComm has no epoch now
  return communicator_;
}

bool EagerLane::aborted() const {
  std::lock_guard lock(state_.mutex);
  return !tasks_.failure().ok() || !state_.resilient->end_status().ok();
}

// -- the work of the lane, on its own thread or a caller's thread --------------------

void EagerLane::ThreadMain() {
  std::unique_lock progress = progress_lock_.Lock();
  Status end;
  do {
    Guarded([&] { RunEpoch(&progress); });
    RetryUntilDone([&] {  // RunEpoch ends only after an abort
      if (state_.cuda) state_.cuda->Abort(communicator_->abort_status());
    });
    end = engine_.MoveToNextEpoch();
  } while (end.ok());
  RetryUntilDone([&] { engine_.FailAll(end); });
}

// Runs `body`. If `body` throws (mostly std::bad_alloc), aborts the epoch on all ranks.
template <typename Body>
void EagerLane::Guarded(const Body& body) {
  try {
    body();
  } catch (const std::exception& e) {
    RetryUntilDone([&] {
      communicator_->AbortAndNotifyPeers(Code::kInternal,
                                         std::string("failed: ") + e.what());
    });
  }
}

void EagerLane::RunEpoch(std::unique_lock<std::mutex>* progress) {
  do {
    progress_lock_.StandAside(progress);
  } while (engine_.Turn(Clock::time_point::max(), TakesSubmissions()).ok());
}

// Runs the eager lane on the thread of a caller that waits for `task`, until the task
// has ended or kLongestTurn has passed since its submission. Returns false if another
// thread runs the lane.
bool EagerLane::Drive(const Task& task) {
  if (Gate::IsDriving()) return false;  // called by a signal handler inside Turn
  std::unique_lock progress = progress_lock_.TryLock();
  if (!progress) return false;
  // Only the lane's own thread may use the CUDA backend, so callers cannot run a lane
  // that has one.
  if (!state_.cuda) {
    const Gate::Driver driver(tasks_.gate().get());
    const InterruptsAfter interrupts(kInterruptAfter);
    const auto until = task.since + kLongestTurn;
    Guarded([&] {
      for (bool goes_on = !task.work.done(); goes_on;)
        goes_on = engine_.Turn(until, TakesSubmissions()).ok() && !task.work.done() &&
                  Clock::now() < until;
    });
  }
  progress.unlock();
  std::lock_guard lock(state_.mutex);
  ++state_.stats.driven;
  if (tasks_.pending() || communicator_->aborted()) progress_lock_.Recall();
  return true;
}

// -- submissions, on any thread ------------------------------------------------------

Result<std::shared_ptr<Work>> EagerLane::Submit(EagerRequest&& request) {
  // This check precedes any lock, because in a forked child a lock may stay locked
  // forever.
  if (!owner_.IsHere())
    return WithContext(
        origin_, request.what.Title(),
        {Code::kFailedPrecondition, "this process was forked after init()"});
  // The communicator of a static job needs no reference here, because it never changes.
  const auto held = state_.resilient->repairs() ? communicator() : nullptr;
  const Communicator& present = held ? *held : *communicator_;
  if (Status s =
          CheckTask(request.what, request.ins, request.outs, request.rooms, present);
      !s.ok())
    return WithContext(present.Prefix(), request.what.Title(), s);
  std::shared_ptr<EagerBackend> backend;
  auto mark = Mark(request, &backend);
  if (!mark.ok())
    return WithContext(present.Prefix(), request.what.Title(), mark.status());
  request.what.placed = !request.outs.empty();
  auto task =
      std::make_shared<Task>(std::move(request.what), tasks_.gate(), request.stream);
  task->ins = std::move(request.ins);
  task->outs = std::move(request.outs);
  task->rooms = std::move(request.rooms);
  task->mark = std::move(mark.value());
  task->timeout = request.timeout;
  task->waits = request.waits;
  task->epoch_index = present.epoch_index();
  {
    std::lock_guard lock(state_.mutex);
    RJ_TRY(tasks_.Enlist(task, backend));
    task->keep = request.keep;
    if (!request.waits && !holds()) progress_lock_.Recall();
  }
  if (request.waits) {
    if (holds()) hurried_.store(true);
    progress_lock_.CountCaller();
    if (Drive(*task)) return WorkOf(std::move(task));
  }
  // The load of held_ is seq_cst, as in Release. If it comes before the fetch_sub of
  // the last Release, the task is already in the queue, and Release wakes the lane.
  // Otherwise this load sees that no Hold is active, and this thread wakes the lane.
  if (request.waits || !held_.load(std::memory_order_seq_cst)) Wake();
  return WorkOf(std::move(task));
}

// Makes the lane's own thread begin a round, unless it stands aside.
void EagerLane::Wake() {
  std::shared_ptr<Communicator> here;
  {
    std::lock_guard lock(state_.mutex);
    here = communicator_;
  }
  here->rounds().Wake();
}

void EagerLane::Release() {
  if (held_.fetch_sub(1, std::memory_order_seq_cst) == 1) Hurry();
}

void EagerLane::Hurry() {
  if (!owner_.IsHere()) return;
  if (holds()) hurried_.store(true);
  {
    std::lock_guard lock(state_.mutex);
    if (tasks_.has_incoming()) progress_lock_.Recall();
  }
  Wake();
}

// For CUDA tensors, records a point in the submitter's stream (EagerBackend::Mark). For
// host tensors, returns null.
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
  {
    std::lock_guard lock(state_.mutex);
    RJ_TRY(tasks_.EnlistJoin(work, *present));
    if (holds()) hurried_.store(true);
    progress_lock_.Recall();
  }
  Wake();
  return work;
}

}  // namespace ringjax
