// The thread of the lane, one round, and the end of the lane. See lane.h. Submissions
// of callers are in lane_submit.cc, when they are taken in is in lane_drive.cc, how
// decisions are run in lane_execute.cc, data sent with a round in lane_piggyback.cc,
// warnings in lane_watch.cc, and the loss of ranks in lane_epoch.cc.
#include "engine/eager/lane.h"

#include <exception>
#include <utility>

namespace ringjax {
namespace {

std::shared_ptr<Gate> MakeGate(const Communicator& c) {
  auto gate = std::make_shared<Gate>();
  gate->spin_seconds = c.options().spin_seconds;
  return gate;
}

// Repeats `f` until it throws no exception, for steps that must be done even if there
// is no memory at the moment.
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
    : origin_(communicator->Prefix()),
      resilient_(communicator->resilient()),
      options_(options),
      communicator_(std::move(communicator)),
      gate_(MakeGate(*communicator_)),
      negotiation_(std::make_unique<Negotiation>(ForNegotiation())) {
  worker_ = std::thread([this] { ThreadMain(); });
}

EagerLane::~EagerLane() {
  if (owner_.IsHere()) {
    Close();
  } else {
    // In a forked child the thread does not exist, and to destroy its joinable handle
    // would end the process. So the handle is leaked.
    [[maybe_unused]] auto* left_behind = new std::thread(std::move(worker_));
  }
}

void EagerLane::Abort(const Status& status) {
  if (!owner_.IsHere()) return;
  // End comes first, and communicator_ is read after it. Inherit works in the opposite
  // order: it writes communicator_ with mutex_ held and then reads end_status(). So a
  // communicator that is new at this moment is aborted either here or there.
  if (resilient_) resilient_->End(status);
  std::shared_ptr<Communicator> here;
  {
    std::lock_guard lock(mutex_);
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
  if (cuda_) cuda_->Close();
}

void EagerLane::set_cuda(EagerBackendMaker make) {
  auto made = make(communicator());
  std::lock_guard lock(mutex_);
  make_cuda_ = std::move(make);
  cuda_ = std::move(made);
}

std::shared_ptr<EagerBackend> EagerLane::cuda() const {
  std::lock_guard lock(mutex_);
  return cuda_;
}

std::shared_ptr<Communicator> EagerLane::communicator() const {
  if (!resilient_) return communicator_;
  if (auto present = resilient_->current()) return present;
  std::lock_guard lock(mutex_);  // the ResilientComm has no epoch now
  return communicator_;
}

bool EagerLane::aborted() const {
  if (!resilient_) return communicator_->aborted();
  std::lock_guard lock(mutex_);
  return !failure_.ok();
}

std::vector<void*> EagerLane::TakeEnded() {
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

EagerStats EagerLane::stats() const {
  std::lock_guard lock(mutex_);
  return stats_;
}

// -- the thread ----------------------------------------------------------------------

void EagerLane::ThreadMain() {
  std::unique_lock progress(progress_lock_);
  Status end;
  do {
    Guarded([&] { Loop(&progress); });
    // Loop ends only after an abort, whose reason is the one that all ranks report.
    Insist([&] {
      end = communicator_->abort_status();
      if (cuda_) cuda_->Abort(end);
    });
    if (MayContinue()) end = Renew();
  } while (end.ok());
  Insist([&] { FailAll(end); });
}

// Runs `body`. An exception (no memory, most likely) becomes an abort on all ranks.
void EagerLane::Guarded(const std::function<void()>& body) {
  try {
    body();
  } catch (const std::exception& e) {
    Insist([&] {
      communicator_->AbortAndNotifyPeers(Code::kInternal,
                                         std::string("failed: ") + e.what());
    });
  }
}

Status EagerLane::Round() {
  {
    std::lock_guard lock(mutex_);
    recording_ = timeline_;
  }
  if (recording_) recording_->Round();
  Piggyback piggyback = Offer();
  const std::string message = negotiation_->TakeMessage();
  const uint64_t first_id = negotiation_->next_id();
  std::vector<std::string> messages;
  RJ_TRY(communicator_->rounds().Exchange(message, &messages, &piggyback));
  std::vector<Decision> decisions;
  if (Status s = negotiation_->Receive(messages, &decisions); !s.ok()) {
    communicator_->AbortAndNotifyPeers(s.code(), s.message(), s.rank());
    return s;
  }
  {
    std::lock_guard lock(mutex_);
    ++stats_.rounds;
    stats_.message_bytes += message.size();
    stats_.cached = hits_before_ + negotiation_->hits();
  }
  sealed_ = false;
  // A rank that sends data in a round submits nothing else in it. So if all ranks have
  // sent data, and one new submission is decided, the data belong to that submission.
  const bool come = piggyback.whole && RunOneNew(decisions, first_id);
  const Piggyback* values = come ? &piggyback : nullptr;
  for (const Decision& decision : decisions) RJ_TRY(Carry(decision, values));
  const bool looks = hurries_ || next_look_ == Clock::time_point::max();
  if (negotiation_->pending() > 0 && looks) next_look_ = Clock::now();
  hurries_ = false;
  return OkStatus();
}

Status EagerLane::Carry(const Decision& decision, const Piggyback* values) {
  switch (decision.kind) {
    case Decision::Kind::kRun:
      return Run(decision, values);
    case Decision::Kind::kFail:
      RJ_TRY(Seal());
      RecordEnd(decision, decision.status);
      if (const TaskPtr task = Mine(decision.fused[0]))
        Finish({task}, decision.status, nullptr);
      break;
    case Decision::Kind::kJoined:
      RJ_TRY(Seal());
      FinishJoin(OkStatus(), decision.last_joined);
      break;
  }
  return OkStatus();
}

EagerLane::TaskPtr EagerLane::Mine(const Ready& ready) const {
  // For this rank the negotiation returns the pointer given to Submit, which is a Task.
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
        enqueued_.emplace_back(task->work, keep);
      else
        ended_.push_back(keep);
    }
    if (!status.ok()) stats_.failures += tasks.size();
    has_ended_.store(!ended_.empty() || !enqueued_.empty(), std::memory_order_release);
  }
  {
    std::lock_guard lock(gate_->mutex);
    for (size_t i = 0; i < tasks.size(); ++i) {
      Work& work = *tasks[i]->work;
      work.status_ = status;
      work.end_ = end;
      if (outputs != nullptr) work.outputs_ = std::move((*outputs)[i]);
      work.done_.store(true, std::memory_order_release);
    }
  }
  gate_->ended.notify_all();
  // The decision, or the negotiation after a failure, still holds the task. So its
  // references are dropped here.
  for (const TaskPtr& task : tasks) {
    task->work.reset();
    task->ins = task->outs = {};
    task->mark.reset();
  }
}

void EagerLane::FinishJoin(const Status& status, int last_joined) {
  std::shared_ptr<Work> work;
  {
    std::lock_guard lock(mutex_);
    work.swap(joined_);
  }
  if (!work) return;
  {
    std::lock_guard lock(gate_->mutex);
    work->status_ = status;
    work->last_joined_ = last_joined;
    work->done_.store(true, std::memory_order_release);
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
  Report(tasks, {}, cause);
  const auto& recorder = communicator_->options().recorder;
  if (recorder && cause.rank() >= 0) recorder->Dump(cause.message());
  for (const TaskPtr& task : tasks)
    Finish({task}, Named(task->Describe(), cause), nullptr);
  FinishJoin(Named(kJoin, cause), -1);
}

}  // namespace ringjax
