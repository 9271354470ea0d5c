// How a communicator ends: the abort, the culprit, and the error that all ranks print.
// See communicator.h.
#include <algorithm>
#include <chrono>
#include <thread>

#include "engine/communicator/communicator.h"
#include "engine/communicator/resilient_comm.h"

namespace ringjax {

void Communicator::Abort(const Status& status) {
  {
    std::lock_guard lock(mutex_);
    if (abort_status_.ok()) abort_status_ = status;
  }
  // Set after the reason, which a thread that sees the flag reads. seq_cst, pairs with
  // Communicator::Guarded, which loads the flag after Progress::Begin has marked the
  // call as active; Progress::Settled loads the mark after this store. Either the call
  // sees the abort, or the report of this rank waits for the call.
  aborted_.store(true, std::memory_order_seq_cst);
  doorbell_->Ring();
  ticket_lock_.WakeAll();
}

Status Communicator::abort_status() const {
  std::lock_guard lock(mutex_);
  return abort_status_;
}

void Communicator::AwaitAbort(std::chrono::milliseconds limit) const {
  const auto end = std::chrono::steady_clock::now() + limit;
  while (!aborted() && std::chrono::steady_clock::now() < end)
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
}

// A peer that has stopped is alive, and it or the coordinator will report the reason.
// Waits for the reason: blaming the peer now would fence a rank that merely restarts.
void Communicator::AwaitReason() const { AwaitAbort(std::chrono::seconds(5)); }

// Ends the communicator and returns the error of the call. A broken link shows only
// that a peer is gone; the heartbeat learns the reason a moment later, so kUnavailable
// waits for it. A peer may have shut down because another rank was lost.
Status Communicator::Fail(const Call& call, const Status& cause) {
  if (cause.code() == Code::kUnavailable) AwaitAbort(std::chrono::milliseconds(200));
  const Status left = CheckShutdowns(entered());
  const bool explained =
      cause.code() == Code::kUnavailable && !left.ok() && left.rank() == cause.rank();
  const Status blame = Blame(call, explained ? left : cause);
  if (!aborted()) {
    End(blame);
  } else if (resilient_ && cause.code() == Code::kCancelled) {
    // This rank was interrupted: it takes part in no later epoch, whatever else failed.
    resilient_->End(Status(
        blame.code(), "rank " + std::to_string(blame.rank()) + " " + blame.message(),
        blame.rank()));
    return WithContext(call, resilient_->end_status());
  }
  return Aborted(call);
}

// Returns the error of a call on an aborted communicator.
Status Communicator::Aborted(const Call& call) const {
  const Status reason = abort_status();
  // An eager lane writes the dump itself, after it has recorded its pending operations.
  const bool ends_job = !resilient_ && !options_.eager && reason.rank() >= 0;
  if (ends_job && options_.recorder) options_.recorder->Dump(reason.message());
  return WithContext(call, reason);
}

void Communicator::End(const Status& blame) {
  Code code = blame.code() == Code::kInternal ? Code::kUnavailable : blame.code();
  const bool own = blame.rank() == options_.world_ranks[rank()];
  // An elastic job continues without the culprit: with kUnavailable, callers wait for
  // the next epoch.
  if (resilient_ && !own) code = Code::kUnavailable;
  const Status status(code,
                      "rank " + std::to_string(blame.rank()) + " " + blame.message(),
                      blame.rank());
  Abort(status);
  if (const auto tell = hooks().on_failure) tell(blame);
  if (resilient_ && own) resilient_->End(status);
}

void Communicator::AbortAndNotifyPeers(Code code, const std::string& what,
                                       int culprit) {
  const int world = culprit < 0 ? options_.world_ranks[rank()] : culprit;
  if (!aborted()) return End(Status(code, what, world));
  // The other ranks may continue in the next epoch; this rank must not.
  if (resilient_ && culprit < 0)
    resilient_->End(Status(code, "rank " + std::to_string(world) + " " + what, world));
}

bool Communicator::AwaitTeardown(double seconds) {
  const auto limit = Clock::now() + std::chrono::duration<double>(seconds);
  bool told = false;
  while (true) {
    const auto teardown_barrier = hooks().teardown_barrier.lock();
    if (!teardown_barrier) return true;  // no heartbeat, so no peers
    if (!std::exchange(told, true)) teardown_barrier->AnnounceTeardown(id(), epoch());
    if (teardown_barrier->NotReady(id(), epoch(), options_.world_ranks).empty())
      return true;
    if (Clock::now() >= limit) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

Status Communicator::WithContext(const Call& call, const Status& status) const {
  return Status(status.code(), Prefix() + Where(call) + ": " + status.message(),
                status.rank());
}

// Returns the culprit, as a world rank, and the predicate of the error about it, such
// as "has not called ...". Peers receive both, so all ranks print the same sentence.
Status Communicator::Blame(const Call& call, const Status& cause) const {
  const int here = options_.world_ranks[rank()];
  int world = cause.rank() < 0 ? here : options_.world_ranks[cause.rank()];
  std::string what = cause.message();
  if (cause.code() == Code::kCancelled) what = "was " + what;
  if (cause.code() == Code::kDeadlineExceeded) {
    const std::vector<int> late = Late();
    if (!late.empty()) {
      world = late.front();
      what = "has not called " + Where(call);
    }
    what += " for " + Digits(endpoints_.timeout) + " s";
    for (size_t i = 1; i < late.size(); ++i)
      what += (i == 1 ? ", nor has rank " : ", rank ") + std::to_string(late[i]);
    const std::vector<ProbeReply> replies =
        ProbeReplies(late.empty() ? std::vector{world} : late);
    for (size_t i = 0; i < std::min(replies.size(), kMostTold); ++i) {
      const std::string reply_text = ReplyText(replies[i]);
      if (i == 0 && !replies[i].host.empty())
        what = "on " + replies[i].host + " " + what;
      if (!reply_text.empty())
        what += (i == 0 ? "; " : "; " + Title(replies[i]) + ": ") + reply_text;
    }
  }
  return Status(cause.code(), what, world);
}

void Communicator::OnPeerShutdown(int world_rank, uint64_t finished) {
  {
    std::lock_guard lock(mutex_);
    shut_down_.emplace(world_rank, finished);
  }
  any_shut_down_.store(true);
  doorbell_->Ring();
}

// A rank that has shut down is the culprit of calls that it has not finished. A call
// that it has finished may still be under way on other ranks, and can complete there.
Status Communicator::CheckShutdowns(uint64_t sequence) const {
  if (!any_shut_down_.load()) return OkStatus();
  std::lock_guard lock(mutex_);
  const auto early =
      std::find_if(shut_down_.begin(), shut_down_.end(),
                   [sequence](const auto& left) { return left.second < sequence; });
  if (early == shut_down_.end()) return OkStatus();
  const auto& members = options_.world_ranks;
  const auto at =
      std::find(members.begin(), members.end(), early->first) - members.begin();
  // The most frequent cause is a loop over batches that is longer on one rank.
  return Status(Code::kUnavailable,
                "has shut down before this call (its program has ended, or called "
                "shutdown); have all ranks equally many batches?",
                static_cast<int>(at));
}

std::string Communicator::Where(const Call& call) const {
  std::string text = call.Title() + " (";
  if (call.tensors.size() == 1)
    text += Describe(call.tensors[0]);
  else
    text += std::to_string(call.tensors.size()) + " tensors";
  if (call.op == Collective::kAllreduce || call.op == Collective::kReducescatter)
    text += ", " + std::string(Name(call.reduce_op));
  return text + ", seq " + std::to_string(entered()) + ")";
}

}  // namespace ringjax
