// The engine across the epochs of its communicator, in a job that survives the loss of
// ranks (resilient_comm.h).
//
// An operation that has ended stays ended, with the same outcome on all ranks that are
// left (DecisionRunner::Seal). Each rank submits all of its other operations again, in
// their order, to a new negotiation, because no rank can tell which messages of the
// last round the others have received. An operation that is impossible for the new
// ranks fails alone.
#include <algorithm>
#include <exception>
#include <mutex>
#include <string>
#include <utility>

#include "engine/eager/progress_engine.h"

namespace ringjax {
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

// Translates a task to the ranks of `present`, the communicator of the new epoch.
// Returns an error if the task cannot run there.
Status Adapt(Task* task, const ResilientComm::Change& change,
             const Communicator& present) {
  const auto lost = [&](const std::string& what) {
    const std::string why = change.reason.empty() ? "" : " (" + change.reason + ")";
    return Status(Code::kUnavailable, what + why);
  };
  const std::string ranks = std::to_string(present.size()) + " ranks";
  const bool past = task->epoch_index < present.epoch_index();
  if (past && !change.repeats) return Status(Code::kUnavailable, Again(change.reason));
  if (task->cuda)
    return lost("NCCL has ended with the ranks that it joined; submit it again");
  if (!past) return OkStatus();
  task->epoch_index = present.epoch_index();
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
  if (Status s = CheckSubmission(*task, present.size()); !s.ok())
    return lost("it cannot be done by the " + ranks +
                " that there are now: " + s.message());
  return OkStatus();
}

}  // namespace

bool ProgressEngine::MayContinue() const {
  return state_.resilient && communicator_->aborted() &&
         communicator_->abort_status().code() == Code::kUnavailable;
}

Status ProgressEngine::Renew() {
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
Status ProgressEngine::Inherit(uint64_t since, Inheritance* all) {
  bool settled = false;
  while (!settled) {
    ResilientComm::Change change;
    RJ_TRY(state_.resilient->Follow(since, &change));
    std::vector<uint64_t> numbers = {since};
    std::shared_ptr<EagerBackend> before;  // kept, to be closed without the mutex
    std::shared_ptr<Communicator> last;    // kept, to be released without the mutex
    {
      std::lock_guard lock(state_.mutex);
      last = std::exchange(state_.communicator, change.communicator);
      before = state_.cuda;
      if (state_.cuda) state_.cuda = state_.make_cuda(communicator_);
      tasks_.Inherit(change.epoch_index, all, &numbers);
    }
    if (before) before->Close();
    if (const Status end = state_.resilient->end_status(); !end.ok()) {
      communicator_->Abort(end);  // EagerLane::Abort may have aborted only `last`
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
      // A task was submitted in an epoch that began and ended while this thread waited.
      RJ_TRY(state_.resilient->Follow(number, &own));
      settled = settled && own.epoch_index == change.epoch_index;
    }
  }
  std::sort(all->tasks.begin(), all->tasks.end(),
            [](const TaskPtr& a, const TaskPtr& b) { return a->order < b->order; });
  return OkStatus();
}

void ProgressEngine::BeginAnew(const Inheritance& all) {
  hits_before_ += negotiation_->hits();
  negotiation_ = std::make_unique<Negotiation>(ForNegotiation());
  stalls_.Clear();
  taken_.clear();
  for (const TaskPtr& task : all.tasks) {
    Status status = Adapt(task.get(), all.since.at(task->epoch_index), *communicator_);
    if (status.ok()) {
      negotiation_->Submit(task);
      continue;
    }
    status = state_.Named(task->Describe(),
                          Status(status.code(), status.message(), all.cause.rank()));
    record_.Failed(*task, status.message());
    tasks_.Finish({task}, status, nullptr);
  }
  if (!all.joins) return;
  const ResilientComm::Change& change = all.since.at(all.join_epoch_index);
  const uint64_t now = communicator_->epoch_index();
  if (!change.repeats && all.join_epoch_index < now)
    return tasks_.FinishJoin(
        state_.Named(kJoinTitle, {Code::kUnavailable, Again(change.reason)}), -1);
  negotiation_->Join();
  tasks_.MoveJoin(now);
}

}  // namespace ringjax
