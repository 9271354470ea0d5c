// The lane across the epochs of its communicator, in a job that survives the loss of
// ranks (resilient_comm.h).
//
// An operation that has ended stays ended, with the same outcome on all ranks that are
// left. A call has a commit decision. A decision of a round that runs no call (a
// barrier, a mismatch, a join) has none, so it is reported only after a barrier call,
// which has one (Seal). Each rank submits all of its other operations again, in their
// order, to a new negotiation, because no rank can tell which messages of the last
// round the others have received. An operation that is impossible for the new ranks
// fails alone.
#include <algorithm>
#include <exception>
#include <map>
#include <utility>

#include "engine/eager/lane.h"

namespace ringjax {

struct EagerLane::Inheritance {
  Status cause;                                     // why the last epoch ended
  std::vector<TaskPtr> tasks;                       // sorted by Task::order
  std::map<uint64_t, ResilientComm::Change> since;  // by the epoch of submission
  bool joins = false;
  uint64_t join_epoch_index = 0;
};

namespace {

// Whether the ranks are unchanged: none is lost, renumbered or new.
bool Same(const ResilientComm::Change& change) {
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
  return resilient_ && communicator_->aborted() &&
         communicator_->abort_status().code() == Code::kUnavailable;
}

// With mutex_ held: puts tasks and a join that belong to a later epoch than the lane's
// back into incoming_. The lane moves to that epoch soon, because its own has been
// aborted.
void EagerLane::HoldBack(bool* joins) {
  const uint64_t now = communicator_->epoch_index();
  if (*joins && join_epoch_index_ > now) {
    *joins = false;
    joins_ = true;
  }
  const auto known = [now](const TaskPtr& task) { return task->epoch_index <= now; };
  const auto later = std::stable_partition(taken_.begin(), taken_.end(), known);
  incoming_.assign(later, taken_.end());
  taken_.erase(later, taken_.end());
}

// Returns ok once all ranks are known to have received this round: by a barrier call,
// unless a call of the round has shown it already. Does nothing without a
// ResilientComm.
Status EagerLane::Seal() {
  if (!resilient_ || sealed_) return OkStatus();
  Call call;
  call.op = Collective::kBarrier;
  call.name = "end of a round of eager operations";
  RJ_TRY(communicator_->RunInThisEpoch(call));
  sealed_ = true;
  return OkStatus();
}

// Waits for the next epoch and begins again there. An error: none follows.
Status EagerLane::Renew() {
  try {
    Inheritance all;
    all.cause = communicator_->abort_status();
    RJ_TRY(Inherit(communicator_->epoch_index(), &all));
    BeginAnew(all);
    return OkStatus();
  } catch (const std::exception& e) {  // out of memory, most likely
    const std::string what = std::string("failed: ") + e.what();
    communicator_->AbortAndNotifyPeers(Code::kInternal, what);
    return Status(Code::kInternal, what);
  }
}

// Moves to the current epoch and collects the tasks of this rank that have not ended.
// Repeats this as long as another epoch begins meanwhile.
Status EagerLane::Inherit(uint64_t since, Inheritance* all) {
  bool settled = false;
  while (!settled) {
    ResilientComm::Change change;
    RJ_TRY(resilient_->Follow(since, &change));
    std::vector<uint64_t> numbers = {since};
    std::shared_ptr<EagerBackend> before;  // closed without mutex_
    std::shared_ptr<Communicator> last;    // released without mutex_
    {
      std::lock_guard lock(mutex_);
      last = std::exchange(communicator_, change.communicator);
      before = cuda_;
      if (cuda_) cuda_ = make_cuda_(communicator_);
      all->tasks.clear();
      // Tasks of a later epoch stay in incoming_. So do those that are submitted from
      // now on: Enlist gives them the index of this epoch or of a later one.
      for (const auto& [key, task] : active_) {
        if (task->epoch_index > change.epoch_index) continue;
        all->tasks.push_back(task);
        numbers.push_back(task->epoch_index);
      }
      std::erase_if(incoming_, [&](const TaskPtr& task) {
        return task->epoch_index <= change.epoch_index;
      });
      all->joins = joined_ && join_epoch_index_ <= change.epoch_index;
      all->join_epoch_index = join_epoch_index_;
      if (all->joins) {
        numbers.push_back(join_epoch_index_);
        joins_ = false;
      }
    }
    if (before) before->Close();
    if (const Status end = resilient_->end_status(); !end.ok()) {
      communicator_->Abort(end);  // EagerLane::Abort aborted the last one
      return end;
    }
    settled = true;
    all->since.clear();
    for (const uint64_t number : numbers) {
      if (all->since.contains(number)) continue;
      ResilientComm::Change& own = all->since[number];
      if (number == since || number == change.epoch_index) {
        own = change;
        continue;
      }
      // For a task of an epoch that began and ended while this thread waited.
      RJ_TRY(resilient_->Follow(number, &own));
      settled = settled && own.epoch_index == change.epoch_index;
    }
  }
  std::sort(all->tasks.begin(), all->tasks.end(),
            [](const TaskPtr& a, const TaskPtr& b) { return a->order < b->order; });
  return OkStatus();
}

// Translates a task to the ranks of the present epoch. An error: it cannot run there.
Status EagerLane::Adapt(Task* task, const ResilientComm::Change& change) const {
  const auto lost = [&](const std::string& what) {
    const std::string why = change.reason.empty() ? "" : " (" + change.reason + ")";
    return Status(Code::kUnavailable, what + why);
  };
  const std::string ranks = std::to_string(communicator_->size()) + " ranks";
  const bool past = task->epoch_index < communicator_->epoch_index();
  if (past && !change.repeats) return Status(Code::kUnavailable, Again(change.reason));
  if (task->cuda)
    return lost("NCCL has ended with the ranks that it joined; submit it again");
  if (!past) return OkStatus();
  task->epoch_index = communicator_->epoch_index();
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
    Status status = Adapt(task.get(), all.since.at(task->epoch_index));
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
  const ResilientComm::Change& change = all.since.at(all.join_epoch_index);
  const uint64_t now = communicator_->epoch_index();
  if (!change.repeats && all.join_epoch_index < now)
    return FinishJoin(Named(kJoin, {Code::kUnavailable, Again(change.reason)}), -1);
  negotiation_->Join();
  std::lock_guard lock(mutex_);
  join_epoch_index_ = now;
}

}  // namespace ringjax
