// ProgressEngine: does the work of an eager lane, on the thread that holds the progress
// lock (compare MPI's progress engine). It passes submissions to the negotiation,
// begins rounds, takes part in rounds that other ranks begin, and carries out the
// decisions. After an epoch has ended, it submits all pending operations again in the
// next epoch.
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

// Owned by an EagerLane. Used only by the thread that holds the progress lock.
class ProgressEngine {
 public:
  ProgressEngine(LaneState& state, TaskQueue& tasks, LaneRecord& record);

  // Runs one round if this rank has items for the negotiation or a peer has begun a
  // round. Otherwise waits for a peer, at most until `until` or Rounds::Wake. If
  // `takes_submissions` is true, first passes the submissions in the queue to the
  // negotiation. An error means that the communicator was aborted.
  Status Turn(Clock::time_point until, bool takes_submissions);

  // Called by the lane's own thread after the communicator was aborted. MoveToNextEpoch
  // waits for the next epoch and submits all pending operations there. If no epoch
  // follows, as in a static job, MoveToNextEpoch returns the error that all ranks
  // report, and FailAll makes all pending and later operations fail with it.
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
  // The messages and the decisions of a round. They are members so that each round uses
  // the memory of the round before.
  std::vector<std::string> messages_;
  std::vector<Decision> decisions_;
};

}  // namespace ringjax
