// See device_event.h.
#include "device/device_event.h"

#include "device/current_context.h"

namespace ringjax::cuda {

Result<std::shared_ptr<PrimaryContext>> PrimaryContext::Open(int device) {
  const auto driver = OpenDriver();
  if (!driver.ok()) return driver.status();
  int count = 0;
  RJ_CUDA(*driver.value(), DeviceGetCount, &count);
  if (device < 0 || device >= count)
    return Status(Code::kInvalidArgument, "there is no CUDA device " +
                                              std::to_string(device) + " among " +
                                              std::to_string(count));
  std::shared_ptr<PrimaryContext> context(new PrimaryContext(*driver.value(), device));
  Device handle = 0;
  RJ_CUDA(context->driver_, DeviceGet, &handle, device);
  RJ_CUDA(context->driver_, DevicePrimaryCtxRetain, &context->context_, handle);
  return context;
}

PrimaryContext::~PrimaryContext() {
  if (!owner_.IsHere() || context_ == nullptr) return;
  for (Event event : spare_) driver_.EventDestroy(event);
  driver_.DevicePrimaryCtxRelease(device_);
}

Result<std::shared_ptr<DeviceEvent>> PrimaryContext::Make() {
  Event event = nullptr;
  {
    std::lock_guard lock(mutex_);
    if (!spare_.empty()) {
      event = spare_.back();
      spare_.pop_back();
    }
  }
  if (event == nullptr) {
    const CurrentContext current(driver_, context_);
    RJ_CUDA(driver_, EventCreate, &event, kEventDisableTiming);
  }
  return std::make_shared<DeviceEvent>(shared_from_this(), event);
}

Result<std::shared_ptr<DeviceEvent>> PrimaryContext::Record(Stream stream) {
  auto event = Make();
  if (!event.ok()) return event;
  const CurrentContext current(driver_, context_);
  RJ_CUDA(driver_, EventRecord, event.value()->event(), stream);
  return event;
}

Result<Pointer> PrimaryContext::Allocate(size_t bytes, Stream stream) {
  const CurrentContext current(driver_, context_);
  Pointer memory = 0;
  RJ_CUDA(driver_, MemAllocAsync, &memory, bytes, stream);
  return memory;
}

void PrimaryContext::Free(Pointer memory, Stream stream) {
  if (!owner_.IsHere() || memory == 0) return;
  const CurrentContext current(driver_, context_);
  driver_.MemFreeAsync(memory, stream);
}

DeviceEvent::~DeviceEvent() {
  if (!primary_context_->owner_.IsHere()) return;
  std::lock_guard lock(primary_context_->mutex_);
  primary_context_->spare_.push_back(event_);
}

bool DeviceEvent::Passed() const {
  return !MayRun(primary_context_->driver_.EventQuery(event_));
}

Status DeviceEvent::Delay(Stream stream) const {
  const CurrentContext current(primary_context_->driver_, primary_context_->context_);
  RJ_CUDA(primary_context_->driver_, StreamWaitEvent, stream, event_, 0);
  return OkStatus();
}

}  // namespace ringjax::cuda
