// ProgressEngine: the work of an eager lane, done by the holder of the progress lock
// (MPI's progress engine). It passes submissions to the negotiation, begins rounds,
// takes part in rounds that other ranks begin, and carries out the decisions. It moves
// from epoch to epoch of the communicator, with all pending operations.
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

// An EagerLane owns the object. Only the holder of the progress lock uses it.
class ProgressEngine {
 public:
  ProgressEngine(LaneState& state, TaskQueue& tasks, LaneRecord& record);

  // Runs one round if this rank has items for the negotiation or a peer has begun a
  // round. Otherwise waits for one of these, at most until `until`. With
  // `takes_submissions`, first passes the submissions in the queue to the negotiation.
  // An error means that the communicator is aborted.
  Status Turn(Clock::time_point until, bool takes_submissions);

  // For the lane's own thread, after the communicator was aborted. MoveToNextEpoch
  // waits for the next epoch and submits all pending operations there. If no epoch
  // follows, as in a static job, it fails with the reason that all ranks report.
  // FailAll makes all pending and later operations fail.
  Status MoveToNextEpoch();
  void FailAll(const Status& cause);

 private:
  NegotiationOptions ForNegotiation();
  void TakeSubmissions();
  Status AwaitMore();
  Status Round();

  Piggyback OfferData() const;  // returns the data to be sent with the round
  void SubmitAgain(const PendingTasks& all, int culprit);

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
