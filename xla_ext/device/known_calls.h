// The calls that a device communicator has made before, so that a repeated call is only
// looked up: neither validated nor planned again.
#pragma once

#include <cstdint>
#include <memory>
#include <unordered_map>

#include "device/consistency_checker.h"
#include "device/device_resources.h"
#include "device/fusion.h"
#include "engine/communicator/communicator.h"

namespace ringjax {

// A cached call: the record that ranks compare, and the fusion plan.
struct KnownCall {
  std::shared_ptr<const CallRecord> record;
  FusionPlan plan;
};

// Owned by a CudaCommunicator; only for the caller whose turn it is.
class KnownCalls {
 public:
  KnownCalls(std::shared_ptr<Communicator> control, const FusionOptions& fusion,
             const DeviceResources& device);

  // Returns the entry of `call`, which this function makes at the first call. Valid
  // until the next Recall.
  const KnownCall& Recall(const Call& call);

 private:
  const std::shared_ptr<Communicator> control_;
  const FusionOptions fusion_;
  const DeviceResources& device_;
  std::unordered_map<uint64_t, std::unique_ptr<KnownCall>> known_;
};

}  // namespace ringjax
