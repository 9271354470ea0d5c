// DecisionRunner: carries out what the negotiation has decided in a round. To run
// operations, it builds one call (batch_builder.h), runs the call, and completes the
// Work of each operation that this rank has submitted.
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

// Owned by a ProgressEngine. Used only by the thread that holds the progress lock.
class DecisionRunner {
 public:
  DecisionRunner(LaneState& state, TaskQueue& tasks, const LaneRecord& record);

  // Carries out all decisions of one round. `values` has the data of all ranks if they
  // were sent with the round; otherwise it is null. An error means that the
  // communicator was aborted, and that tasks without an outcome are still pending.
  Status RunAll(const std::vector<Decision>& decisions, const Piggyback* values);

 private:
  // The memory to which MoveAside redirects results, as large as the largest batch so
  // far.
  struct Scratch {
    std::unique_ptr<std::byte, void (*)(void*)> memory{nullptr, nullptr};
    uint64_t size = 0;
  };

  Status RunDecision(const Decision& decision, const Piggyback* values);
  Status RunCall(const Decision& decision, const Piggyback* values);
  Status RunOrComplete(const Decision& decision, const Piggyback* values,
                       Clock::time_point agreed, Batch* batch);
  Status OpenDevice(const Submission& first);
  Status MoveAside(Batch* batch);
  bool IsLost(const Status& status) const;
  Status ConfirmRound();

  LaneState& state_;
  const std::shared_ptr<Communicator>& communicator_;  // the lane's current epoch
  TaskQueue& tasks_;
  const LaneRecord& record_;
  const BatchBuilder builder_;
  KeptCall kept_;  // the call that was built last
  Scratch scratch_;
  bool round_confirmed_ =
      false;  // whether all ranks are known to have received this round
};

}  // namespace ringjax
