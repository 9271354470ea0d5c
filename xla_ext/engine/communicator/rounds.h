// Rounds: exchanges in which every rank sends one message to all ranks. Each eager lane
// (engine/eager/) has a communicator of its own for its rounds, and defines the
// messages.
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
#include "engine/communicator/requests.h"
#include "engine/communicator/stall_monitor.h"

namespace ringjax {

// Only the thread that holds the progress lock of the eager lane may use the object,
// but any thread may call Wake. Between rounds the holder sleeps until a peer begins
// the next round. The arguments of the constructor must outlive the object.
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

  // Sends `own` to every rank, and stores the messages of all ranks in `*all`, in rank
  // order. A round counts as a call but has no commit decision: if the epoch ends
  // during a round, one rank may have received the messages and another rank not.
  Status Exchange(const std::string& own, std::vector<std::string>* all,
                  Piggyback* piggyback = nullptr);

  // The ranks of this host for each of its CPUs, rounded up.
  long ranks_per_cpu() const { return state_.ranks_per_cpu; }
  // Returns whether all ranks rely on a finished round as on a finished call, because
  // no epoch can follow. If false, some ranks may continue without the messages of the
  // round.
  bool final() const { return !state_.repairs; }
  // Returns whether the data of an operation may be sent with a round. That requires
  // final rounds, a shared segment and no forced algorithm.
  bool CanPiggyback(Collective op) const {
    return final() && state_.endpoints.segment && planner_.Forced(op).empty();
  }
  // Completes a call from the data that all ranks have sent with the last round.
  // values[r] is the whole input of rank r, and is empty in a broadcast unless r is the
  // root. The call must have one tensor and be an allreduce or reduce-scatter without
  // prescale, a broadcast, an allgather, or an alltoall with equal splits. `agreed` is
  // the time at which the round ended. `*requests` receives the requests of the call.
  // If it already has them, from a call that differed only in its addresses, the call
  // is neither checked nor split again.
  Status RunPiggybacked(const Call& call, Requests* requests,
                        std::span<const std::span<const std::byte>> values,
                        Clock::time_point agreed);

  // Sleeps until a peer begins the next round (then sets `*begun`), Wake is called, or
  // the deadline passes. If a peer is gone, aborts the communicator, but only if the
  // next round is `required`; otherwise the next call reports that peer.
  Status AwaitNext(Clock::time_point deadline, bool required, bool* begun);
  void Wake();  // any thread may call this function

 private:
  Status LookForRound(bool* begun);
  std::vector<Waiter::Interest> Interests() const;

  CommState& state_;
  CallRunner& runner_;
  const FailureReport& failures_;
  CallLog& log_;
  StallMonitor& stalls_;
  const Planner& planner_;
  // This waiter is kept between rounds, because it adapts to the length of the waits.
  std::unique_ptr<Waiter> waiter_;
  std::vector<bool> closed_;  // whether AwaitNext found the link to each rank closed
  std::atomic<bool> asleep_{false}, woken_{false};  // see AwaitNext and Wake
};

}  // namespace ringjax
