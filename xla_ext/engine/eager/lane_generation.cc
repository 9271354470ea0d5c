// The lane from one generation of its communicator to the next, in a job that goes on
// without the ranks it loses (succession.h).
//
// What has ended stays ended, and alike on all ranks that go on: a call has a verdict,
// and what a round decides without one is told behind a barrier that has (Seal). All
// that has not ended is submitted again to a new negotiation, in its order, because
// nobody knows what the others have heard of it. What cannot be, for the new ranks,
// fails alone.
#include <algorithm>
#include <exception>
#include <map>
#include <utility>

#include "engine/eager/lane.h"

namespace ringjax {

struct EagerLane::Inheritance {
  Status cause;                                  // the end of the generation before
  std::vector<TaskPtr> tasks;                    // by order
  std::map<uint64_t, Succession::Change> since;  // by generation they were submitted in
  bool joins = false;
  uint64_t join_generation = 0;
};

namespace {

// Whether every rank is what it was, and no other one is there.
bool Same(const Succession::Change& change) {
  const auto size = static_cast<size_t>(change.communicator->size());
  if (change.ranks.size() != size) return false;
  for (size_t r = 0; r < size; ++r)
    if (change.ranks[r] != static_cast<int>(r)) return false;
  return true;
}

std::string Again(const std::string& reason) {
  return "training starts again" + (reason.empty() ? "" : ": " + reason);
}

}  // namespace

bool EagerLane::MayContinue() const {
  return succession_ && communicator_->aborted() &&
         communicator_->abort_status().code() == Code::kUnavailable;
}

// With mutex_ held: leaves for later what was submitted in a generation that the thread
// does not know yet. It will soon, because then this one has been aborted.
void EagerLane::HoldBack(bool* joins) {
  const uint64_t now = communicator_->generation();
  if (*joins && join_generation_ > now) {
    *joins = false;
    joins_ = true;
  }
  const auto known = [now](const TaskPtr& task) { return task->generation <= now; };
  const auto later = std::stable_partition(taken_.begin(), taken_.end(), known);
  incoming_.assign(later, taken_.end());
  taken_.erase(later, taken_.end());
}

// All ranks are known to have heard this round when this returns ok.
Status EagerLane::Seal() {
  if (!succession_ || sealed_) return OkStatus();
  Call call;
  call.op = Collective::kBarrier;
  call.name = "end of a round of eager operations";
  RJ_TRY(communicator_->RunOnce(call));
  sealed_ = true;
  return OkStatus();
}

// Parks until there is a generation to go on in, and begins there. Not ok: there is
// none, and why.
Status EagerLane::Renew() {
  try {
    Inheritance all;
    all.cause = communicator_->abort_status();
    RJ_TRY(Inherit(communicator_->generation(), &all));
    BeginAnew(all);
    return OkStatus();
  } catch (const std::exception& e) {  // out of memory, most likely
    const std::string what = std::string("failed: ") + e.what();
    communicator_->GiveUp(Code::kInternal, what);
    return Status(Code::kInternal, what);
  }
}

// Moves to the generation of the moment, and takes what this rank waits for.
Status EagerLane::Inherit(uint64_t since, Inheritance* all) {
  bool settled = false;
  while (!settled) {
    Succession::Change change;
    RJ_TRY(succession_->Follow(since, &change));
    std::vector<uint64_t> numbers = {since};
    std::shared_ptr<EagerBackend> before;  // NCCL ends with the ranks that it joined
    std::shared_ptr<Communicator> last;    // let go without the lock
    {
      std::lock_guard lock(mutex_);
      last = std::exchange(communicator_, change.communicator);
      before = cuda_;
      if (cuda_) cuda_ = make_cuda_(communicator_);
      all->tasks.clear();
      // What is submitted from now on is submitted to this generation or a later one.
      for (const auto& [key, task] : active_) {
        if (task->generation > change.generation) continue;
        all->tasks.push_back(task);
        numbers.push_back(task->generation);
      }
      std::erase_if(incoming_, [&](const TaskPtr& task) {
        return task->generation <= change.generation;
      });
      all->joins = joined_ && join_generation_ <= change.generation;
      all->join_generation = join_generation_;
      if (all->joins) {
        numbers.push_back(join_generation_);
        joins_ = false;
      }
    }
    if (before) before->Close();
    if (const Status end = succession_->end_status(); !end.ok()) {
      communicator_->Abort(end);  // who ended it may not have known this one
      return end;
    }
    settled = true;
    all->since.clear();
    for (const uint64_t number : numbers) {
      if (all->since.contains(number)) continue;
      Succession::Change& own = all->since[number];
      if (number == since || number == change.generation) {
        own = change;
        continue;
      }
      // Of a generation that came and went while the thread was parked.
      RJ_TRY(succession_->Follow(number, &own));
      settled = settled && own.generation == change.generation;
    }
  }
  std::sort(all->tasks.begin(), all->tasks.end(),
            [](const TaskPtr& a, const TaskPtr& b) { return a->order < b->order; });
  return OkStatus();
}

// Whether a task can be submitted to this generation, and what it means there.
Status EagerLane::Adapt(Task* task, const Succession::Change& change) const {
  const auto lost = [&](const std::string& what) {
    const std::string why = change.reason.empty() ? "" : " (" + change.reason + ")";
    return Status(Code::kUnavailable, what + why);
  };
  const std::string ranks = std::to_string(communicator_->size()) + " ranks";
  const bool past = task->generation < communicator_->generation();
  if (past && !change.repeats) return Status(Code::kUnavailable, Again(change.reason));
  if (task->cuda)
    return lost("NCCL has ended with the ranks that it joined; submit it again");
  if (!past) return OkStatus();
  task->generation = communicator_->generation();
  if (Same(change)) return OkStatus();
  if (task->op == Collective::kBroadcast) {
    const auto root = static_cast<size_t>(task->root);
    const int now = root < change.ranks.size() ? change.ranks[root] : -1;
    if (now < 0)
      return lost("root_rank " + std::to_string(task->root) +
                  " was lost; submit it again with a root among the " + ranks +
                  " that there are now");
    task->root = now;
  }
  if (task->op == Collective::kReducescatter)
    return lost(
        "its result was made for another number of ranks; submit it again for " +
        ranks);
  if (!task->splits.empty())
    return lost(
        "its splits are for ranks that there were before; submit it again with "
        "splits for " +
        ranks);
  if (Status s = CheckSubmission(*task, communicator_->size()); !s.ok())
    return lost("it cannot be done by the " + ranks +
                " that there are now: " + s.message());
  return OkStatus();
}

void EagerLane::BeginAnew(const Inheritance& all) {
  hits_before_ += negotiation_->hits();
  negotiation_ = std::make_unique<Negotiation>(ForNegotiation());
  watched_.clear();
  next_look_ = Clock::time_point::max();
  taken_.clear();
  for (const TaskPtr& task : all.tasks) {
    Status status = Adapt(task.get(), all.since.at(task->generation));
    if (status.ok()) {
      negotiation_->Submit(task);
      continue;
    }
    status = Named(task->Describe(),
                   Status(status.code(), status.message(), all.cause.rank()));
    if (recording_) recording_->Failed(RowOf(*task), status.message());
    Finish({task}, status, nullptr);
  }
  if (!all.joins) return;
  const Succession::Change& change = all.since.at(all.join_generation);
  const uint64_t now = communicator_->generation();
  if (!change.repeats && all.join_generation < now)
    return FinishJoin(Named(kJoin, {Code::kUnavailable, Again(change.reason)}), -1);
  negotiation_->Join();
  std::lock_guard lock(mutex_);
  join_generation_ = now;
}

}  // namespace ringjax
