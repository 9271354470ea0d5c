// The engine across the epochs of its communicator, in a job that survives the loss of
// ranks (resilient_comm.h).
//
// An operation that has ended stays ended, with the same outcome on all remaining ranks
// (DecisionRunner::ConfirmRound). Each rank submits its other operations again, in
// their order, to a new negotiation, because no rank knows which messages of the last
// round the other ranks have received. An operation that is impossible for the new
// ranks fails alone.
#include <algorithm>
#include <exception>
#include <mutex>
#include <string>
#include <utility>

#include "engine/eager/progress_engine.h"

namespace ringjax {
namespace {

// Returns whether the ranks are unchanged: none is lost, renumbered or new.
bool RanksUnchanged(const std::vector<int>& ranks, int size) {
  if (ranks.size() != static_cast<size_t>(size)) return false;
  for (int r = 0; r < size; ++r)
    if (ranks[static_cast<size_t>(r)] != r) return false;
  return true;
}

std::string RestartReason(const std::string& reason) {
  return "training starts again" + (reason.empty() ? "" : ": " + reason);
}

// Translates a task to the ranks of `present`, the communicator of the new epoch.
// Returns an error if the task cannot run there.
Status AdaptToRanks(Task* task, const Communicator& present) {
  const uint64_t index = present.epoch_index();
  const auto change = present.resilient()->Changes(task->epoch_index, index);
  const auto lost = [&](const std::string& what) {
    const std::string why = change.reason.empty() ? "" : " (" + change.reason + ")";
    return Status(Code::kUnavailable, what + why);
  };
  const std::string ranks = std::to_string(present.size()) + " ranks";
  if (!change.repeats) return Status(Code::kUnavailable, RestartReason(change.reason));
  if (task->cuda)
    return lost("NCCL has ended with the ranks that it joined; submit it again");
  if (std::exchange(task->epoch_index, index) == index) return OkStatus();
  if (RanksUnchanged(change.ranks, present.size())) return OkStatus();
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

Status ProgressEngine::MoveToNextEpoch() {
  try {
    const Status cause = communicator_->abort_status();
    // With another code, such as after an interrupt of this rank, no epoch follows.
    if (cause.code() != Code::kUnavailable) return cause;
    // After the swap, `next` is the ended communicator, which is released without the
    // mutex.
    std::shared_ptr<Communicator> next;
    RJ_TRY(state_.resilient->AwaitNextEpoch(communicator_->epoch_index(), &next));
    std::shared_ptr<EagerBackend> before;  // closed below, without the mutex
    PendingTasks all;
    {
      std::lock_guard lock(state_.mutex);
      state_.communicator.swap(next);
      before = state_.cuda;
      if (state_.cuda) state_.cuda = state_.make_cuda(communicator_);
      all = tasks_.CollectPending(communicator_->epoch_index());
    }
    if (before) before->Close();
    // EagerLane::Abort may have aborted only the ended communicator. See there.
    const Status end = state_.resilient->end_status();
    if (!end.ok()) communicator_->Abort(end);
    if (end.ok()) SubmitAgain(all, cause.rank());
    return end;
  } catch (const std::exception& e) {  // out of memory, most likely
    const std::string what = std::string("failed: ") + e.what();
    communicator_->AbortAndNotifyPeers(Code::kInternal, what);
    return Status(Code::kInternal, what);
  }
}

// Submits all pending operations to a new negotiation. `culprit` is the rank that the
// ended epoch has lost.
void ProgressEngine::SubmitAgain(const PendingTasks& all, int culprit) {
  hits_before_ += negotiation_->hits();
  negotiation_ = std::make_unique<Negotiation>(ForNegotiation());
  stalls_.Clear();
  taken_.clear();
  for (const TaskPtr& task : all.tasks) {
    Status status = AdaptToRanks(task.get(), *communicator_);
    if (status.ok()) {
      negotiation_->Submit(task);
      continue;
    }
    status = state_.WithContext(task->Describe(),
                                Status(status.code(), status.message(), culprit));
    record_.Failed(*task, status.message());
    tasks_.Finish({task}, status, nullptr);
  }
  if (!all.joins) return;
  const auto change =
      state_.resilient->Changes(all.join_epoch_index, communicator_->epoch_index());
  if (change.repeats) return negotiation_->Join();
  tasks_.FinishJoin(state_.WithContext(
                        kJoinTitle, {Code::kUnavailable, RestartReason(change.reason)}),
                    -1);
}

}  // namespace ringjax
