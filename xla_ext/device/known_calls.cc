// See known_calls.h.
#include "device/known_calls.h"

#include <utility>

#include "device/reduction.h"

namespace ringjax {
namespace {

constexpr size_t kMostKnown = 512;

// The key of a call in known_, whose entries keep the result of Validate. So the key
// also covers properties that Validate checks but that the fingerprint does not have.
uint64_t KeyOf(const Call& call) {
  uint64_t key = Fingerprint(call);
  auto add = [&key](uint64_t word) { key = (key ^ word) * 0x100000001b3ull; };
  for (int64_t rows : call.rows) add(static_cast<uint64_t>(rows));
  for (const Tensor& t : call.tensors) add(t.room);
  return key;
}

}  // namespace

KnownCalls::KnownCalls(std::shared_ptr<Communicator> control,
                       const FusionOptions& fusion, const DeviceResources& device)
    : control_(std::move(control)), fusion_(fusion), device_(device) {}

const KnownCall& KnownCalls::Recall(const Call& call) {
  const uint64_t key = KeyOf(call);
  auto found = known_.find(key);
  if (found == known_.end()) {
    if (known_.size() >= kMostKnown) known_.clear();
    auto known = std::make_unique<KnownCall>();
    auto record = std::make_shared<CallRecord>(call);
    record->fits = control_->Validate(call);
    if (record->fits.ok()) record->fits = CheckReductions(call, control_->size());
    if (record->fits.ok()) {
      FusionOptions fusion = fusion_;
      fusion.can_pack = device_.kernels().available();
      Result<FusionPlan> plan = PlanFusion(call, control_->size(), fusion);
      record->fits = plan.status();
      if (plan.ok()) known->plan = std::move(plan.value());
    }
    known->record = std::move(record);
    found = known_.emplace(key, std::move(known)).first;
  }
  return *found->second;
}

}  // namespace ringjax
