// CallCompletion: decides when a call may return, and completes a call whose epoch has
// ended while the call ran.
#pragma once

#include <cstdint>

#include "base/status.h"
#include "engine/call/descriptor.h"
#include "engine/call/frame.h"
#include "engine/communicator/comm_state.h"
#include "engine/communicator/failure_report.h"

namespace ringjax {

// How far a call got in one epoch. If the epoch was aborted during the call, the work
// that remains after the commit decision depends on these values.
struct CallAttempt {
  // Whether every rank has the outcome or can complete the call alone, so that the call
  // may return without a commit decision.
  bool globally_complete = false;
  // Whether this rank has its results, or the error that all ranks report.
  bool locally_complete = false;
  Status outcome;         // valid if locally_complete
  uint64_t sequence = 0;  // number of the call in this epoch, from 1; 0 if unknown

  // The place from which this rank can take the results of a committed call alone.
  enum class Source {
    kNotNeeded,    // the call has no results: a barrier, or only empty tensors
    kInlineData,   // the inline data of all ranks, in the shared segment
    kTileResults,  // the reduced tiles, in the shared segment (tiles.h)
    kNone,         // no place: only all ranks together can complete the call
  } source = Source::kNone;
  // Counter values in the shared segment. Once the counters of all ranks have reached
  // the value, `source` is complete. 0 if no counter can show that.
  uint64_t agreed = 0;   // value of kAgreed, for kInlineData and kNotNeeded
  uint64_t reduced = 0;  // value of kReduced, for kTileResults
};

// Ends the calls of one communicator. In an elastic job, a call returns only when every
// rank has its results or can complete the call alone. Only the thread that runs a call
// uses the object. The arguments of the constructor must outlive the object.
//
// A call that every rank can complete from the shared segment has no barrier at its
// end. Still, either all ranks return from the call or none: a rank that was frozen,
// for example, must not return from a call that the other ranks run again. So a rank
// whose call has failed (EndFailed) sets its stop flag in the shared segment, and then
// reads the counters of all ranks. A rank that has all data (StoppedRank) has published
// its counter, and then reads the stop flags. All of these accesses are seq_cst.
// Therefore either the failed rank sees every counter and reports the call as done, or
// every other rank sees the stop flag and does not return. If a read could be reordered
// before the preceding write, both ranks could miss each other.
class CallCompletion {
 public:
  CallCompletion(CommState* state, const FailureReport* failures)
      : state_(*state), failures_(*failures) {}

  // How a rank waits at the end of a call until all ranks have their results.
  enum class Barrier {
    kNone,      // the rank does not wait
    kFinished,  // the counters kFinished show that all ranks have finished the tiles
    kFrames,    // one more exchange, without data
  };
  // Ends a call whose results are complete on this rank and whose outcome is the same
  // on all ranks. In an elastic job, first waits until all ranks have their results, or
  // can complete the call alone.
  Status End(const Call& call, const Status& outcome, Barrier barrier,
             const Frame& frame, Waiter* waiter, CallAttempt* attempt);
  // Ends a call that has failed on this rank. Sets the stop flag of this rank if other
  // ranks could complete the call alone.
  void EndFailed(CallAttempt* attempt);
  // Implements Communicator::CompleteCommitted.
  Status CompleteCommitted(const Call& call, const CallAttempt& attempt) const;

 private:
  // Waits until the call has ended in all replica sets. Returns `outcome`, or the error
  // of another replica set in which the call failed.
  Status EndEverywhere(const Call& call, const Status& outcome);
  // Returns a rank whose stop flag is set, or -1.
  int StoppedRank(const CallAttempt& attempt) const;
  bool SourceIsComplete(const CallAttempt& attempt) const;

  CommState& state_;
  const FailureReport& failures_;
};

}  // namespace ringjax
