// See milestone.h.
#include "device/milestone.h"

#include "device/bound.h"

namespace ringjax::cuda {

Result<std::shared_ptr<Ground>> Ground::Open(int device) {
  const auto driver = OpenDriver();
  if (!driver.ok()) return driver.status();
  int count = 0;
  RJ_CUDA(*driver.value(), DeviceGetCount, &count);
  if (device < 0 || device >= count)
    return Status(Code::kInvalidArgument, "there is no CUDA device " +
                                              std::to_string(device) + " among " +
                                              std::to_string(count));
  std::shared_ptr<Ground> ground(new Ground(*driver.value(), device));
  Device handle = 0;
  RJ_CUDA(ground->driver_, DeviceGet, &handle, device);
  RJ_CUDA(ground->driver_, DevicePrimaryCtxRetain, &ground->context_, handle);
  return ground;
}

Ground::~Ground() {
  if (!owner_.IsHere() || context_ == nullptr) return;
  for (Event event : spare_) driver_.EventDestroy(event);
  driver_.DevicePrimaryCtxRelease(device_);
}

Result<std::shared_ptr<Milestone>> Ground::Make() {
  Event event = nullptr;
  {
    std::lock_guard lock(mutex_);
    if (!spare_.empty()) {
      event = spare_.back();
      spare_.pop_back();
    }
  }
  if (event == nullptr) {
    const Bound bound(driver_, context_);
    RJ_CUDA(driver_, EventCreate, &event, kEventDisableTiming);
  }
  return std::make_shared<Milestone>(shared_from_this(), event);
}

Result<std::shared_ptr<Milestone>> Ground::Record(Stream stream) {
  auto milestone = Make();
  if (!milestone.ok()) return milestone;
  const Bound bound(driver_, context_);
  RJ_CUDA(driver_, EventRecord, milestone.value()->event(), stream);
  return milestone;
}

Result<Pointer> Ground::Allocate(size_t bytes, Stream stream) {
  const Bound bound(driver_, context_);
  Pointer memory = 0;
  RJ_CUDA(driver_, MemAllocAsync, &memory, bytes, stream);
  return memory;
}

void Ground::Free(Pointer memory, Stream stream) {
  if (!owner_.IsHere() || memory == 0) return;
  const Bound bound(driver_, context_);
  driver_.MemFreeAsync(memory, stream);
}

Milestone::~Milestone() {
  if (!ground_->owner_.IsHere()) return;
  std::lock_guard lock(ground_->mutex_);
  ground_->spare_.push_back(event_);
}

bool Milestone::Passed() const { return !MayRun(ground_->driver_.EventQuery(event_)); }

Status Milestone::Delay(Stream stream) const {
  const Bound bound(ground_->driver_, ground_->context_);
  RJ_CUDA(ground_->driver_, StreamWaitEvent, stream, event_, 0);
  return OkStatus();
}

}  // namespace ringjax::cuda
