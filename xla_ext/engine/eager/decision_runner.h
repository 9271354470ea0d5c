// DecisionRunner: carries out the decisions of a round. For a decision to run
// operations, it builds one call (batch_builder.h), runs the call and completes this
// rank's works.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/status.h"
#include "engine/call/agreement.h"
#include "engine/communicator/communicator.h"
#include "engine/eager/batch_builder.h"
#include "engine/eager/lane_record.h"
#include "engine/eager/lane_state.h"
#include "engine/eager/negotiation.h"
#include "engine/eager/task_queue.h"

namespace ringjax {

// A ProgressEngine owns the object. Only the holder of the progress lock uses it.
class DecisionRunner {
 public:
  DecisionRunner(LaneState& state, TaskQueue& tasks, const LaneRecord& record);

  // Carries out all decisions of one round. `values`, or null, has the data of all
  // ranks for the only call among the decisions. An error means that the communicator
  // is aborted. Tasks without an outcome are then still pending.
  Status RunAll(const std::vector<Decision>& decisions, const Piggyback* values);

 private:
  // Memory of the lane for MoveAside. It grows to the size of the largest batch so far.
  struct Scratch {
    std::unique_ptr<std::byte, void (*)(void*)> memory{nullptr, nullptr};
    uint64_t size = 0;
  };

  Status RunDecision(const Decision& decision, const Piggyback* values);
  Status RunCall(const Decision& decision, const Piggyback* values);
  Status RunOrComplete(const Decision& decision, const Piggyback* values, Batch* batch);
  Status OpenDevice(const Submission& first);
  Status MoveAside(Batch* batch);
  bool IsLost(const Status& status) const;
  Status ConfirmRound();

  LaneState& state_;
  const std::shared_ptr<Communicator>& communicator_;  // the lane's current epoch
  TaskQueue& tasks_;
  const LaneRecord& record_;
  const BatchBuilder builder_;
  Scratch scratch_;
  bool round_confirmed_ =
      false;  // whether all ranks are known to have received this round
};

}  // namespace ringjax
