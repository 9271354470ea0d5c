// A communicator as one generation of a succession: one call that may be cut off, what
// is left of it, and what this rank reports when the generation has ended.
#include <chrono>

#include "base/failpoint.h"
#include "engine/call/agreement.h"
#include "engine/call/notes.h"
#include "engine/call/tiles.h"
#include "engine/communicator/communicator.h"
#include "engine/communicator/succession.h"

namespace ringjax {

void Communicator::Installed(uint64_t generation) {
  progress_->Installed();
  generation_.store(generation, std::memory_order_release);
}

void Communicator::SetCost(const CostModel& cost, const std::string& algorithm,
                           bool trial) {
  const auto set = [&] {
    trial_ = trial;
    options_.cost = cost;
    options_.algorithm = algorithm;
    plans_.clear();
    std::lock_guard lock(mutex_);
    stats_ = {};
  };
  if (Continues()) return succession_->Between(set);
  const auto stop = [this] { return aborted() ? abort_status() : OkStatus(); };
  if (!turnstile_.Wait(turnstile_.Take(), stop).ok()) return;  // no call follows
  const Turn here(&turnstile_);
  set();
}

Status Communicator::Try(const Call& call, Attempt* attempt) {
  attempt->sequence = progress_->begun() + 1;
  return Guarded(call, [&] { return RunExclusive(call, attempt); });
}

Status Communicator::RunOnce(const Call& call, const Status& fits) {
  Attempt attempt;
  if (!Continues())
    return InTurn(turnstile_.Take(), call,
                  [&] { return RunExclusive(call, &attempt, &fits); });
  const Status status = InTurn(turnstile_.Take(), call, [&] {
    attempt.sequence = progress_->begun() + 1;
    return RunExclusive(call, &attempt, &fits);
  });
  if (attempt.over) return status;
  // One that did not even begin has the number of the next.
  if (attempt.sequence == 0) attempt.sequence = progress_->begun() + 1;
  const Status verdict = succession_->Judge(generation(), attempt.sequence);
  return verdict.ok() ? Complete(call, attempt) : Named(call, verdict);
}

Status Communicator::Close(const Call& call, const Status& outcome, Barrier barrier,
                           const Frame& frame, Waiter* waiter, Attempt* attempt) {
  attempt->outcome = outcome;
  attempt->complete = true;
  if (progress_) {
    progress_->Done(entered());
    if (Status s = AtFailpoint(Failpoint::kComplete); !s.ok()) return Fail(call, s);
    if (const int peer = Sealed(*attempt); peer >= 0) {
      AwaitNews();
      return Fail(call, Status(Code::kUnavailable, "has stopped", peer));
    }
    if (options_.ending) {
      const Status all = EndEverywhere(call, outcome);
      if (!all.ok() && aborted()) return all;
      attempt->outcome = all;
    } else if (barrier != Barrier::kNone && size() > 1) {
      const bool fetched = barrier == Barrier::kFetched;
      if (Status s = AwaitEnd(frame, lane_, fetched, waiter); !s.ok())
        return Fail(call, s);
    }
    if (Status s = AtFailpoint(Failpoint::kClosed); !s.ok()) return Fail(call, s);
    progress_->Returned(entered());
  }
  attempt->over = true;
  return attempt->outcome;
}

// One more call, on the communicator of all: whoever comes to its end knows that all
// have come here. Ranks that have failed mean another one, so that all hear of it.
Status Communicator::EndEverywhere(const Call& call, const Status& outcome) {
  Call end;
  end.op = Collective::kBarrier;
  end.name = outcome.ok() ? "the end of a call" : "the end of a call that has failed";
  end.timeout = call.timeout;
  Communicator& ending = *options_.ending;
  const Status all = ending.Run(end);
  if (all.ok()) return outcome;
  if (!ending.aborted())  // it was compared, and differs: so it is on all ranks
    return outcome.ok()
               ? Named(call, {Code::kMismatch,
                              "it has failed at another place of the groups: " +
                                  all.message(),
                              all.rank()})
               : outcome;
  if (all.code() == Code::kCancelled) return Fail(call, {all.code(), "interrupted"});
  // Ranks of the world there; and others go on without the one that is to blame.
  AwaitAbort(std::chrono::milliseconds(200));
  const Status why = ending.abort_status();
  if (!aborted()) Abort(Status(Code::kUnavailable, why.message(), why.rank()));
  return Aborted(call);
}

void Communicator::Seal(Attempt* attempt) {
  if (!lane_.board || attempt->rest == Attempt::Rest::kLost) return;
  lane_.board->Stop();
  if (Shown(*attempt)) progress_->Done(entered());
}

int Communicator::Sealed(const Attempt& attempt) const {
  const bool barrier = attempt.turn == 0 && attempt.summed == 0;
  return barrier || !progress_ || !lane_.board ? -1 : lane_.board->Stopped();
}

bool Communicator::Shown(const Attempt& attempt) const {
  if (attempt.turn > 0) return HaveAgreed(attempt.turn, lane_);
  bool shown = attempt.summed > 0;
  for (int rank = 0; rank < size() && shown; ++rank)
    shown = lane_.board->Look(Board::kSummed, rank) >= attempt.summed;
  return shown;
}

Status Communicator::Complete(const Call& call, const Attempt& attempt) {
  if (attempt.complete) return attempt.outcome;
  if (attempt.rest == Attempt::Rest::kNothing) return OkStatus();
  // Every rank has shown its part before any rank could return from the call; and none
  // can have begun to overwrite it, which takes a call that this rank agrees to.
  std::vector<Request> requests = Split(call);
  const bool note = attempt.rest == Attempt::Rest::kNote;
  if (!Shown(attempt))
    return Named(call, {Code::kInternal,
                        "counts as finished, but its results are not here: the ranks "
                        "do not agree about what was done"});
  Request& request = requests[0];
  if (note) {
    Values values;
    bool whole = false;
    RJ_TRY(ReadNotes(request.problem, request.arithmetic, lane_, &values, &whole));
    Finish(request.problem, request.arithmetic, values, rank(), request.out);
  } else {
    request.memory.in = &request.in;
    request.memory.out = &request.out;
    FetchTiles(request.memory, request.problem.counts[0], request.arithmetic, lane_);
  }
  return OkStatus();
}

Status Communicator::Quiesce(double seconds, Standing* standing) {
  if (!aborted())
    return Status(Code::kFailedPrecondition, Prefix() + "quiesce comes after abort");
  if (!progress_)
    return Status(Code::kFailedPrecondition, Prefix() + "it has no succession");
  if (!progress_->Settled(seconds))
    return Status(Code::kDeadlineExceeded, Prefix() + "a call has not stopped within " +
                                               std::to_string(seconds) +
                                               " s after the abort");
  *standing = progress_->Read();
  return OkStatus();
}

}  // namespace ringjax
