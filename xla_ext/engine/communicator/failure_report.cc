// Implements FailureReport: finds the rank to blame and composes the error. See
// failure_report.h.
#include "engine/communicator/failure_report.h"

#include <algorithm>
#include <chrono>

#include "engine/communicator/resilient_comm.h"

namespace ringjax {
namespace {

// Returns "rank 3 was interrupted", with the code and the rank of `blame`.
Status Sentence(const Status& blame) {
  return Status(blame.code(),
                "rank " + std::to_string(blame.rank()) + " " + blame.message(),
                blame.rank());
}

}  // namespace

// Waits until the peer that has ended its call, or the coordinator, reports the reason.
// Such a peer is alive and can take part in the next epoch. An error on this rank that
// blamed the peer would exclude (fence) the peer from the job.
void FailureReport::AwaitReason() const { state_.abort.Await(std::chrono::seconds(5)); }

// Aborts the communicator and returns the error of the call. A broken link
// (kUnavailable) does not show why a peer is gone: the peer may have shut down after
// the loss of another rank. The heartbeat receives the reason a moment later, so Fail
// waits for it.
Status FailureReport::Fail(const Call& call, const Status& cause) const {
  if (cause.code() == Code::kUnavailable)
    state_.abort.Await(std::chrono::milliseconds(200));
  const auto& segment = state_.endpoints.segment;
  if (segment && cause.rank() >= 0)
    if (const auto finished = segment->FinishedOf(cause.rank()))
      state_.abort.OnPeerShutdown(state_.options.world_ranks[cause.rank()], *finished);
  const Status left = state_.abort.CheckShutdowns(state_.sequence());
  const bool explained =
      cause.code() == Code::kUnavailable && !left.ok() && left.rank() == cause.rank();
  const Status blame = FindCulprit(call, explained ? left : cause);
  if (TryAbort(blame) || cause.code() != Code::kCancelled) return Aborted(call);
  // This rank was interrupted, so it takes part in no later epoch, even if another
  // thread has aborted the communicator for another reason.
  state_.resilient->End(Sentence(blame));
  return ErrorOf(call, state_.resilient->end_status());
}

Status FailureReport::Aborted(const Call& call) const {
  return ErrorOf(call, state_.abort.status());
}

// In a static job, the error of a call ends the job, so the recorder writes its file.
// In an elastic job the ResilientComm calls Dump. An eager lane calls Dump itself,
// after it has recorded its pending operations.
Status FailureReport::ErrorOf(const Call& call, const Status& reason) const {
  if (!state_.repairs && !state_.options.eager) Dump(reason);
  return WithContext(call, reason);
}

void FailureReport::Dump(const Status& reason) const {
  const auto& recorder = state_.options.recorder;
  if (recorder && reason.rank() >= 0) recorder->Dump(reason.message());
}

bool FailureReport::TryAbort(const Status& blame) const {
  if (state_.abort.aborted()) return false;
  Code code = blame.code() == Code::kInternal ? Code::kUnavailable : blame.code();
  const bool own = blame.rank() == state_.world_rank();
  // An elastic job continues without the rank to blame. kUnavailable makes callers wait
  // for the next epoch.
  if (state_.repairs && !own) code = Code::kUnavailable;
  const Status status = Sentence({code, blame.message(), blame.rank()});
  if (!state_.abort.Abort(status)) return false;
  heartbeat_.NotifyPeers(blame);
  if (own) state_.resilient->End(status);
  return true;
}

void FailureReport::AbortAndNotifyPeers(Code code, const std::string& what,
                                        int culprit) const {
  const Status blame(code, what, culprit < 0 ? state_.world_rank() : culprit);
  // This rank is to blame, so it must not continue in the next epoch as other ranks
  // may.
  if (!TryAbort(blame) && culprit < 0) state_.resilient->End(Sentence(blame));
}

Status FailureReport::WithContext(const Call& call, const Status& status) const {
  return Status(status.code(),
                state_.Prefix() + DescribeCall(call) + ": " + status.message(),
                status.rank());
}

// Peers receive the culprit and the predicate, such as "has not called ...", so all
// ranks print the same sentence.
Status FailureReport::FindCulprit(const Call& call, const Status& cause) const {
  const int here = state_.world_rank();
  int world = cause.rank() < 0 ? here : state_.options.world_ranks[cause.rank()];
  std::string what = cause.message();
  if (cause.code() == Code::kCancelled) what = "was " + what;
  if (cause.code() == Code::kDeadlineExceeded) {
    const std::vector<int> late = heartbeat_.Late();
    if (!late.empty()) {
      world = late.front();
      what = "has not called " + DescribeCall(call);
    }
    what += " for " + Digits(state_.endpoints.timeout) + " s";
    for (size_t i = 1; i < late.size(); ++i)
      what += (i == 1 ? ", nor has rank " : ", rank ") + std::to_string(late[i]);
    const std::vector<ProbeReply> replies =
        heartbeat_.ProbeReplies(late.empty() ? std::vector{world} : late);
    for (size_t i = 0; i < std::min(replies.size(), kMaxReplies); ++i) {
      const std::string reply_text = ReplyText(replies[i]);
      if (i == 0 && !replies[i].host.empty())
        what = "on " + replies[i].host + " " + what;
      if (!reply_text.empty())
        what += (i == 0 ? "; " : "; " + Title(replies[i]) + ": ") + reply_text;
    }
  }
  return Status(cause.code(), what, world);
}

std::string FailureReport::DescribeCall(const Call& call) const {
  std::string text = call.Title() + " (";
  if (call.tensors.size() == 1)
    text += Describe(call.tensors[0]);
  else
    text += std::to_string(call.tensors.size()) + " tensors";
  if (call.op == Collective::kAllreduce || call.op == Collective::kReducescatter)
    text += ", " + std::string(Name(call.reduce_op));
  return text + ", seq " + std::to_string(state_.sequence()) + ")";
}

}  // namespace ringjax
