// DecisionRunner: carries out the decisions of a round. For operations that are to run,
// it builds one call (batch_builder.h), runs the call and completes the works of this
// rank.
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

// Owned by ProgressEngine, and used by the holder of the progress lock only.
class DecisionRunner {
 public:
  DecisionRunner(LaneState& state, TaskQueue& tasks, const LaneRecord& record);

  // Carries out all decisions of one round. `values`: the data of the only call among
  // them, from all ranks, or null. An error means that the communicator is aborted;
  // tasks without an outcome are still pending then.
  Status CarryAll(const std::vector<Decision>& decisions, const Piggyback* values);

 private:
  // Memory for results in place. It grows to the largest batch so far, and is kept.
  struct Scratch {
    std::unique_ptr<std::byte, void (*)(void*)> memory{nullptr, nullptr};
    uint64_t size = 0;
  };

  Status Carry(const Decision& decision, const Piggyback* values);
  Status Run(const Decision& decision, const Piggyback* values);
  Status Perform(const Decision& decision, const Piggyback* values, Batch* batch);
  Status OpenDevice(const Submission& first);
  Status MoveAside(Batch* batch);
  bool IsLost(const Status& status) const;
  Status Seal();

  LaneState& state_;
  const std::shared_ptr<Communicator>& communicator_;  // the lane's current epoch
  TaskQueue& tasks_;
  const LaneRecord& record_;
  const BatchBuilder builder_;
  Scratch scratch_;      // memory that MoveAside uses
  bool sealed_ = false;  // all ranks are known to have received this round
};

}  // namespace ringjax
