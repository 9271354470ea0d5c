// The thread, a round, the end. See lane.h; what callers hand in goes through
// lane_submit.cc, who looks for it and when is in lane_drive.cc, how decisions are run
// in lane_execute.cc, which values come with the news in lane_beside.cc, what is said
// about those who are late in lane_watch.cc, what becomes of it all when ranks are lost
// in lane_generation.cc.
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
    : origin_(communicator->Prefix()),
      succession_(communicator->succession()),
      options_(options),
      communicator_(std::move(communicator)),
      gate_(MakeGate(*communicator_)),
      negotiation_(std::make_unique<Negotiation>(ForNegotiation())) {
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
  // First, so that the thread moves to no other generation after this.
  if (succession_) succession_->End(status);
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
  if (!succession_) return communicator_;
  if (auto present = succession_->current()) return present;
  std::lock_guard lock(mutex_);  // it has ended
  return communicator_;
}

bool EagerLane::aborted() const {
  if (!succession_) return communicator_->aborted();
  std::lock_guard lock(mutex_);
  return !failure_.ok();
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
  std::unique_lock wheel(wheel_);
  Status end;
  do {
    Guarded([&] { Loop(&wheel); });
    // Whatever ends the loop has aborted the communicator: all ranks give this reason.
    Insist([&] {
      end = communicator_->abort_status();
      if (cuda_) cuda_->Abort(end);
    });
    if (MayContinue()) end = Renew();
  } while (end.ok());
  Insist([&] { FailAll(end); });
}

// `body`, which an exception ends: out of memory, most likely. Peers must know.
void EagerLane::Guarded(const std::function<void()>& body) {
  try {
    body();
  } catch (const std::exception& e) {
    Insist([&] {
      communicator_->GiveUp(Code::kInternal, std::string("failed: ") + e.what());
    });
  }
}

Status EagerLane::Round() {
  {
    std::lock_guard lock(mutex_);
    recording_ = timeline_;
  }
  if (recording_) recording_->Round();
  Beside beside = Offer();
  const std::string news = negotiation_->TakeNews();
  const uint64_t first_id = negotiation_->next_id();
  std::vector<std::string> messages;
  RJ_TRY(communicator_->Exchange(news, &messages, &beside));
  std::vector<Decision> decisions;
  if (Status s = negotiation_->Receive(messages, &decisions); !s.ok()) {
    communicator_->GiveUp(s.code(), s.message(), s.rank());
    return s;
  }
  {
    std::lock_guard lock(mutex_);
    ++stats_.rounds;
    stats_.news_bytes += news.size();
    stats_.cached = hits_before_ + negotiation_->hits();
  }
  sealed_ = false;
  // Who gave values submitted nothing else, so they are those of what is new.
  const bool come = beside.whole && RunOneNew(decisions, first_id);
  const Beside* values = come ? &beside : nullptr;
  for (const Decision& decision : decisions) RJ_TRY(Carry(decision, values));
  const bool looks = hurries_ || next_look_ == Clock::time_point::max();
  if (negotiation_->pending() > 0 && looks) next_look_ = Clock::now();
  hurries_ = false;
  return OkStatus();
}

Status EagerLane::Carry(const Decision& decision, const Beside* values) {
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
  Report(tasks, {}, cause);
  const auto& recorder = communicator_->recorder();
  if (recorder && cause.rank() >= 0) recorder->Dump(cause.message());
  for (const TaskPtr& task : tasks)
    Finish({task}, Named(task->Describe(), cause), nullptr);
  FinishJoin(Named(kJoin, cause), -1);
}

}  // namespace ringjax
