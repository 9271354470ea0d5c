// Implements CallCompletion: the barriers and stop flags at the end of a call. See
// call_completion.h.
#include "engine/communicator/call_completion.h"

#include <chrono>

#include "base/failpoint.h"
#include "engine/call/agreement.h"
#include "engine/call/inline_data.h"
#include "engine/call/tiles.h"
#include "engine/communicator/communicator.h"
#include "engine/communicator/requests.h"

namespace ringjax {

Status CallCompletion::End(const Call& call, const Status& outcome, Barrier barrier,
                           const Frame& frame, Waiter* waiter, CallAttempt* attempt) {
  attempt->outcome = outcome;
  attempt->locally_complete = true;
  // In a static job, a rank may return from a call before other ranks have their
  // results: if this rank is lost afterwards, the whole job fails anyway.
  if (state_.repairs) {
    state_.progress->Done(state_.sequence());
    if (Status s = AtFailpoint(Failpoint::kComplete); !s.ok())
      return failures_.Fail(call, s);
    if (const int peer = StoppedRank(*attempt); peer >= 0) {
      failures_.AwaitReason();
      return failures_.Fail(call, Status(Code::kUnavailable, "has stopped", peer));
    }
    if (state_.options.end_barrier) {
      const Status all = EndEverywhere(call, outcome);
      if (!all.ok() && state_.abort.aborted()) return all;
      attempt->outcome = all;
    } else if (barrier != Barrier::kNone && state_.size() > 1) {
      const bool in_tiles = barrier == Barrier::kFinished;
      if (Status s = AwaitEnd(frame, state_.endpoints, in_tiles, waiter); !s.ok())
        return failures_.Fail(call, s);
    }
    if (Status s = AtFailpoint(Failpoint::kClosed); !s.ok())
      return failures_.Fail(call, s);
    state_.progress->Returned(state_.sequence());
  }
  attempt->globally_complete = true;
  return attempt->outcome;
}

// Runs a barrier on the communicator of all replica sets. Once a rank has left the
// barrier, all ranks have reached it. A rank whose call has failed uses another name
// for its barrier, so all ranks learn of the failure by a mismatch of the names.
Status CallCompletion::EndEverywhere(const Call& call, const Status& outcome) {
  Call end;
  end.op = Collective::kBarrier;
  end.name = outcome.ok() ? "the end of a call" : "the end of a call that has failed";
  end.timeout = call.timeout;
  Communicator& ending = *state_.options.end_barrier;
  const Status all = ending.Run(end);
  if (all.ok()) return outcome;
  if (!ending.aborted())  // a mismatch of the names, which all ranks see
    return outcome.ok()
               ? failures_.WithContext(
                     call,
                     {Code::kMismatch,
                      "it has failed at another place of the groups: " + all.message(),
                      all.rank()})
               : outcome;
  if (all.code() == Code::kCancelled)
    return failures_.Fail(call, {all.code(), "interrupted"});
  // An elastic job continues without the rank to blame, which `why` names. The code
  // kUnavailable makes the call wait for the next epoch.
  state_.abort.Await(std::chrono::milliseconds(200));
  const Status why = ending.abort_status();
  if (!state_.abort.aborted())
    state_.abort.Abort(Status(Code::kUnavailable, why.message(), why.rank()));
  return failures_.Aborted(call);
}

void CallCompletion::EndFailed(CallAttempt* attempt) {
  if (!state_.endpoints.segment || attempt->source == CallAttempt::Source::kNone)
    return;
  state_.endpoints.segment->Stop();
  if (SourceIsComplete(*attempt)) state_.progress->Done(state_.sequence());
}

int CallCompletion::StoppedRank(const CallAttempt& attempt) const {
  const bool barrier = attempt.agreed == 0 && attempt.reduced == 0;
  return barrier || !state_.endpoints.segment ? -1
                                              : state_.endpoints.segment->Stopped();
}

bool CallCompletion::SourceIsComplete(const CallAttempt& attempt) const {
  if (attempt.agreed > 0) return HaveAgreed(attempt.agreed, state_.endpoints);
  bool shown = attempt.reduced > 0;
  for (int rank = 0; rank < state_.size() && shown; ++rank)
    shown = state_.endpoints.segment->Look(SharedSegment::kReduced, rank) >=
            attempt.reduced;
  return shown;
}

Status CallCompletion::CompleteCommitted(const Call& call,
                                         const CallAttempt& attempt) const {
  if (attempt.locally_complete) return attempt.outcome;
  if (attempt.source == CallAttempt::Source::kNotNeeded) return OkStatus();
  // Every rank had published its part before any rank could return from the call. No
  // rank can have overwritten its part since then, because a rank overwrites its part
  // only in a later call, after this rank has agreed to that later call.
  Requests requests = Split(call, state_.rank(), state_.size());
  const bool inlined = attempt.source == CallAttempt::Source::kInlineData;
  if (!SourceIsComplete(attempt))
    return failures_.WithContext(
        call, {Code::kInternal,
               "counts as finished, but its results are not here: the ranks "
               "do not agree about what was done"});
  Request& request = requests[0];
  if (inlined) {
    Values values;
    bool whole = false;
    RJ_TRY(ReadInline(request.problem, request.arithmetic, state_.endpoints, &values,
                      &whole));
    FinishInline(request.problem, request.arithmetic, values, state_.rank(),
                 request.out);
  } else {
    request.buffers.in = &request.in;
    request.buffers.out = &request.out;
    CopyOutRetained(request.buffers, request.problem.counts[0], request.arithmetic,
                    state_.endpoints);
  }
  return OkStatus();
}

}  // namespace ringjax
