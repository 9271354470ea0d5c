// ProgressEngine: the work of an eager lane, done by the holder of the progress lock
// (MPI's progress engine). It takes in submissions, begins rounds, takes part in the
// rounds of other ranks, and carries out what the negotiation decides.
//
// The engine moves from epoch to epoch of the communicator, with all pending operations
// (progress_engine_epoch.cc).
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "base/status.h"
#include "engine/call/agreement.h"
#include "engine/call/waiter.h"
#include "engine/communicator/communicator.h"
#include "engine/eager/decision_runner.h"
#include "engine/eager/lane_record.h"
#include "engine/eager/lane_state.h"
#include "engine/eager/negotiation.h"
#include "engine/eager/stall_inspector.h"
#include "engine/eager/task_queue.h"

namespace ringjax {

// Owned by EagerLane, and used by the holder of the progress lock only.
class ProgressEngine {
 public:
  ProgressEngine(LaneState& state, TaskQueue& tasks, LaneRecord& record);

  // Runs one round if this rank or a peer has a reason for one, else waits for a
  // reason, at most until `until`. `takes_in`: takes in submissions first. An error
  // means that the communicator is aborted.
  Status Turn(Clock::time_point until, bool takes_in);

  // For the lane's own thread, after the communicator was aborted. Renew waits for the
  // next epoch and continues there. If no epoch follows, as in a static job, it fails
  // with the reason that all ranks report. FailAll fails all pending and later
  // operations.
  Status Renew();
  void FailAll(const Status& cause);

 private:
  NegotiationOptions ForNegotiation();
  void TakeIn();
  Status Gather();
  Status Round();

  // Data that are sent with a round (progress_engine_piggyback.cc).
  Piggyback Offer() const;

  // Epochs (progress_engine_epoch.cc).
  void BeginAnew(const Inheritance& all, int culprit);

  LaneState& state_;
  const std::shared_ptr<Communicator>& communicator_;  // the lane's current epoch
  TaskQueue& tasks_;
  LaneRecord& record_;
  DecisionRunner runner_;
  StallInspector stalls_;
  std::unique_ptr<Negotiation> negotiation_;
  uint64_t hits_before_ = 0;    // cache hits in earlier epochs
  std::vector<TaskPtr> taken_;  // tasks from the queue; empty between turns
};

}  // namespace ringjax
