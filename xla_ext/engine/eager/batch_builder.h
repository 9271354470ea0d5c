// BatchBuilder: builds one call from a decision of the negotiation. The tensors of the
// call are those of this rank's tasks. A result whose size only all ranks together
// determine may need memory of the core. A rank that has joined contributes neutral
// elements and drops the results. Nothing is copied.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "engine/call/descriptor.h"
#include "engine/communicator/communicator.h"
#include "engine/eager/lane_state.h"
#include "engine/eager/negotiation.h"
#include "engine/eager/task.h"
#include "engine/eager/work.h"

namespace ringjax {

struct Batch {
  static constexpr size_t kAlign = 64;  // bytes; alignment of memory for a call

  Call call;
  std::string name;
  std::vector<TaskPtr> tasks;  // tasks of this rank
  std::vector<std::vector<Output>> outputs;
  std::vector<std::shared_ptr<void>>
      joined_memory;  // memory for a rank that has joined
  // Tensors in place that the call reduces into other memory first, so that their
  // inputs stay unchanged: the index in `call`, and the address where the result
  // belongs.
  std::vector<std::pair<size_t, void*>> aside;
  std::vector<std::shared_ptr<DevicePoint>> marks;
  std::shared_ptr<DevicePoint> end;
};

// Owned by DecisionRunner, and used by the holder of the progress lock only.
class BatchBuilder {
 public:
  explicit BatchBuilder(const LaneState& state);

  // Sets `call` and its memory. `tasks` are set already, and `outputs` has an entry for
  // each of them.
  Status Build(const Decision& decision, Batch* batch) const;

 private:
  Status AddFixed(const Ready& ready, size_t i, Batch* batch) const;
  Status AddRagged(const Ready& ready, size_t i, std::vector<Output>* outputs,
                   Batch* batch) const;
  Result<std::shared_ptr<void>> Allocate(const Submission& s, uint64_t bytes,
                                         std::span<const std::byte> pattern) const;

  const LaneState& state_;
  const std::shared_ptr<Communicator>& communicator_;  // the lane's current epoch
};

}  // namespace ringjax
