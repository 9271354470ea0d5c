// Rounds: exchanges of one message between all ranks, for the thread of an eager lane,
// which has the communicator to itself. The eager lane defines the messages
// (engine/eager/).
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "engine/call/agreement.h"
#include "engine/call/descriptor.h"
#include "engine/communicator/call_log.h"
#include "engine/communicator/call_runner.h"
#include "engine/communicator/comm_state.h"
#include "engine/communicator/failure_report.h"
#include "engine/communicator/planner.h"
#include "engine/communicator/stall_monitor.h"

namespace ringjax {

// Only one thread may use it, that of an eager lane, except for Wake. Between rounds
// that thread sleeps until a peer begins the next round. The arguments of the
// constructor must outlive the object.
class Rounds {
 public:
  Rounds(CommState* state, CallRunner* runner, const FailureReport* failures,
         CallLog* log, StallMonitor* stalls, const Planner* planner)
      : state_(*state),
        runner_(*runner),
        failures_(*failures),
        log_(*log),
        stalls_(*stalls),
        planner_(*planner) {}

  // Sends one message to every rank and receives one from each; `*all` is ordered by
  // rank. A round counts as a call but has no commit decision: if the epoch ends under
  // a round, one rank may have received its messages and another rank not.
  Status Exchange(const std::string& own, std::vector<std::string>* all,
                  Piggyback* piggyback = nullptr);

  // Whether a finished round is as final as a finished call, because no epoch can
  // follow. Otherwise some ranks may continue without having received its messages.
  bool final() const { return !state_.repairs; }
  // Whether the data of an operation may be piggybacked on a round. That requires final
  // rounds, a shared segment and no forced algorithm.
  bool CanPiggyback(Collective op) const {
    return final() && state_.endpoints.segment && planner_.Forced(op).empty();
  }
  // Completes a call from the data that all ranks have piggybacked on the last round.
  // values[r] is the whole input of rank r; in a broadcast only the root has one. The
  // call must have one tensor and be an allreduce or reduce-scatter without prescale, a
  // broadcast, an allgather, or an alltoall with equal splits.
  Status RunPiggybacked(const Call& call,
                        std::span<const std::span<const std::byte>> values);

  // Sleeps until a peer begins the next round (`*called` is set), Wake is called, or
  // the deadline passes. Aborts the communicator if a peer is gone and the next round
  // is `required`; otherwise the next call reports that peer.
  Status AwaitNext(Clock::time_point deadline, bool required, bool* called);
  void Wake();  // any thread may call this function

 private:
  Status LookForCall(bool* called);
  std::vector<Waiter::Interest> Callers() const;

  CommState& state_;
  CallRunner& runner_;
  const FailureReport& failures_;
  CallLog& log_;
  StallMonitor& stalls_;
  const Planner& planner_;
  // The waiter is kept because it adapts to the length of the waits.
  std::unique_ptr<Waiter> resting_;
  std::vector<bool> closed_;  // whether AwaitNext found each rank's link closed
  std::atomic<bool> asleep_{false}, woken_{false};  // see AwaitNext and Wake
};

}  // namespace ringjax
