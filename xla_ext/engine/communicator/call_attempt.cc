// A communicator as one epoch of a ResilientComm: an attempt of a call that the end of
// the epoch may interrupt, the completion of such a call from the shared segment, and
// the report of this rank after the epoch has ended. See communicator.h and
// resilient_comm.h.
#include <chrono>

#include "base/failpoint.h"
#include "engine/call/agreement.h"
#include "engine/call/inline_data.h"
#include "engine/call/tiles.h"
#include "engine/communicator/communicator.h"
#include "engine/communicator/resilient_comm.h"

namespace ringjax {

void Communicator::OnInstalled(uint64_t epoch_index) {
  progress_->Installed();
  epoch_index_.store(epoch_index, std::memory_order_release);
}

void Communicator::SetCostModel(const CostModel& cost, const std::string& algorithm,
                                bool trial) {
  const auto set = [&] {
    trial_ = trial;
    options_.cost = cost;
    options_.algorithm = algorithm;
    plans_.clear();
    std::lock_guard lock(mutex_);
    stats_ = {};
  };
  if (Continues()) return resilient_->Between(set);
  const auto stop = [this] { return aborted() ? abort_status() : OkStatus(); };
  if (!ticket_lock_.Wait(ticket_lock_.Take(), stop).ok()) return;  // no call follows
  const TicketLockGuard here(&ticket_lock_);
  set();
}

Status Communicator::Attempt(const Call& call, CallAttempt* attempt) {
  attempt->sequence = progress_->begun() + 1;
  return Guarded(call, [&] { return RunExclusive(call, attempt); });
}

Status Communicator::RunInThisEpoch(const Call& call, const Status& fits) {
  CallAttempt attempt;
  if (!Continues())
    return InTurn(ticket_lock_.Take(), call,
                  [&] { return RunExclusive(call, &attempt, &fits); });
  const Status status = InTurn(ticket_lock_.Take(), call, [&] {
    attempt.sequence = progress_->begun() + 1;
    return RunExclusive(call, &attempt, &fits);
  });
  if (attempt.globally_complete) return status;
  // The call did not begin, so its number would have been the next one.
  if (attempt.sequence == 0) attempt.sequence = progress_->begun() + 1;
  const Status decision = resilient_->Judge(epoch_index(), attempt.sequence);
  return decision.ok() ? CompleteCommitted(call, attempt) : WithContext(call, decision);
}

Status Communicator::Close(const Call& call, const Status& outcome, Barrier barrier,
                           const Frame& frame, Waiter* waiter, CallAttempt* attempt) {
  attempt->outcome = outcome;
  attempt->locally_complete = true;
  if (progress_) {
    progress_->Done(entered());
    if (Status s = AtFailpoint(Failpoint::kComplete); !s.ok()) return Fail(call, s);
    if (const int peer = Sealed(*attempt); peer >= 0) {
      AwaitReason();
      return Fail(call, Status(Code::kUnavailable, "has stopped", peer));
    }
    if (options_.end_barrier) {
      const Status all = EndEverywhere(call, outcome);
      if (!all.ok() && aborted()) return all;
      attempt->outcome = all;
    } else if (barrier != Barrier::kNone && size() > 1) {
      const bool fetched = barrier == Barrier::kFinished;
      if (Status s = AwaitEnd(frame, endpoints_, fetched, waiter); !s.ok())
        return Fail(call, s);
    }
    if (Status s = AtFailpoint(Failpoint::kClosed); !s.ok()) return Fail(call, s);
    progress_->Returned(entered());
  }
  attempt->globally_complete = true;
  return attempt->outcome;
}

// Runs a barrier on the communicator of all replica sets. A rank that leaves the
// barrier can rely on all ranks having reached it. A rank whose call has failed gives
// its barrier another name, so the failure reaches all ranks as a mismatch.
Status Communicator::EndEverywhere(const Call& call, const Status& outcome) {
  Call end;
  end.op = Collective::kBarrier;
  end.name = outcome.ok() ? "the end of a call" : "the end of a call that has failed";
  end.timeout = call.timeout;
  Communicator& ending = *options_.end_barrier;
  const Status all = ending.Run(end);
  if (all.ok()) return outcome;
  if (!ending.aborted())  // a mismatch, the same on all ranks
    return outcome.ok()
               ? WithContext(call, {Code::kMismatch,
                                    "it has failed at another place of the groups: " +
                                        all.message(),
                                    all.rank()})
               : outcome;
  if (all.code() == Code::kCancelled) return Fail(call, {all.code(), "interrupted"});
  // `why` names a world rank, without which the other ranks go on.
  AwaitAbort(std::chrono::milliseconds(200));
  const Status why = ending.abort_status();
  if (!aborted()) Abort(Status(Code::kUnavailable, why.message(), why.rank()));
  return Aborted(call);
}

void Communicator::Seal(CallAttempt* attempt) {
  if (!endpoints_.segment || attempt->source == CallAttempt::Source::kNone) return;
  endpoints_.segment->Stop();
  if (Shown(*attempt)) progress_->Done(entered());
}

int Communicator::Sealed(const CallAttempt& attempt) const {
  const bool barrier = attempt.agreed == 0 && attempt.reduced == 0;
  return barrier || !progress_ || !endpoints_.segment ? -1
                                                      : endpoints_.segment->Stopped();
}

bool Communicator::Shown(const CallAttempt& attempt) const {
  if (attempt.agreed > 0) return HaveAgreed(attempt.agreed, endpoints_);
  bool shown = attempt.reduced > 0;
  for (int rank = 0; rank < size() && shown; ++rank)
    shown = endpoints_.segment->Look(SharedSegment::kReduced, rank) >= attempt.reduced;
  return shown;
}

Status Communicator::CompleteCommitted(const Call& call, const CallAttempt& attempt) {
  if (attempt.locally_complete) return attempt.outcome;
  if (attempt.source == CallAttempt::Source::kNotNeeded) return OkStatus();
  // Every rank had published its part before any rank could return from the call. No
  // rank can have overwritten its part since, because that happens only in a later
  // call, after this rank has agreed to that call.
  std::vector<Request> requests = Split(call);
  const bool inlined = attempt.source == CallAttempt::Source::kInlineData;
  if (!Shown(attempt))
    return WithContext(call,
                       {Code::kInternal,
                        "counts as finished, but its results are not here: the ranks "
                        "do not agree about what was done"});
  Request& request = requests[0];
  if (inlined) {
    Values values;
    bool whole = false;
    RJ_TRY(
        ReadInline(request.problem, request.arithmetic, endpoints_, &values, &whole));
    Finish(request.problem, request.arithmetic, values, rank(), request.out);
  } else {
    request.buffers.in = &request.in;
    request.buffers.out = &request.out;
    CopyOutRetained(request.buffers, request.problem.counts[0], request.arithmetic,
                    endpoints_);
  }
  return OkStatus();
}

Status Communicator::Quiesce(double seconds, ProgressReport* standing) {
  if (!aborted())
    return Status(Code::kFailedPrecondition, Prefix() + "quiesce comes after abort");
  if (!progress_)
    return Status(Code::kFailedPrecondition, Prefix() + "it is not resilient");
  if (!progress_->Settled(seconds))
    return Status(Code::kDeadlineExceeded, Prefix() + "a call has not stopped within " +
                                               std::to_string(seconds) +
                                               " s after the abort");
  *standing = progress_->Read();
  return OkStatus();
}

}  // namespace ringjax
