// See device_resources.h.
#include "device/device_resources.h"

#include <string>
#include <utility>

#include "device/current_context.h"
#include "device/eventually.h"

namespace ringjax {
namespace {

constexpr double kLastWork = 5;  // seconds for streams to become idle

}  // namespace

Status DeviceResources::Open(InFlight::ReportTime report_time) {
  RJ_TRY(OpenDevice());
  const CurrentContext current(driver_, context_);
  auto kernels = cuda::Kernels::Load(driver_, ordinal_);
  if (!kernels.ok()) return kernels.status();
  kernels_ = std::move(kernels.value());
  in_flight_ = std::make_unique<InFlight>(driver_, std::move(report_time));
  int least = 0, greatest = 0;
  if (driver_.CtxGetStreamPriorityRange != nullptr)
    RJ_CUDA(driver_, CtxGetStreamPriorityRange, &least, &greatest);
  RJ_CUDA(driver_, StreamCreateWithPriority, &comm_stream_, cuda::kStreamNonBlocking,
          greatest);
  RJ_CUDA(driver_, StreamCreateWithPriority, &side_stream_, cuda::kStreamNonBlocking,
          greatest);
  RJ_CUDA(driver_, EventCreate, &fence_, cuda::kEventDisableTiming);
  constexpr size_t kWords = 64;
  RJ_CUDA(driver_, MemAllocAsync, &words_, kWords * sizeof(unsigned), side_stream_);
  RJ_CUDA(driver_, MemsetD32Async, words_, 0, kWords, side_stream_);
  RJ_CUDA(driver_, StreamSynchronize, side_stream_);
  return OkStatus();
}

Status DeviceResources::OpenDevice() {
  int count = 0;
  RJ_CUDA(driver_, DeviceGetCount, &count);
  if (ordinal_ < 0 || ordinal_ >= count)
    return Status(Code::kInvalidArgument,
                  "there is no such device among " + std::to_string(count));
  cuda::Device device = 0;
  RJ_CUDA(driver_, DeviceGet, &device, ordinal_);
  RJ_CUDA(driver_, DevicePrimaryCtxRetain, &context_, device);
  return OkStatus();
}

// Returns the workspace of the communication stream. All calls share one workspace,
// because a stream runs in order. The memory comes from the driver's pool, so that the
// workspace can grow without a wait for the device.
Result<cuda::Pointer> DeviceResources::Scratch(size_t bytes) {
  if (bytes > scratch_bytes_) {
    if (scratch_ != 0) RJ_CUDA(driver_, MemFreeAsync, scratch_, comm_stream_);
    scratch_ = 0;
    scratch_bytes_ = 0;
    RJ_CUDA(driver_, MemAllocAsync, &scratch_, bytes, comm_stream_);
    scratch_bytes_ = bytes;
  }
  return scratch_;
}

void DeviceResources::Delay(cuda::Stream stream) const {
  if (driver_.EventRecord(fence_, comm_stream_) == cuda::kSuccess)
    driver_.StreamWaitEvent(stream, fence_, 0);
}

// Work behind an aborted operation, on any stream, may still use the events, memory and
// kernels of the communicator. If that work does not end in time, the communicator
// leaks these resources, because releasing them would wait for the device without a
// limit.
bool DeviceResources::AwaitIdle() const {
  return Eventually(kLastWork, [&] {
    for (cuda::Stream s : {comm_stream_, side_stream_})
      if (s != nullptr && cuda::MayRun(driver_.StreamQuery(s))) return false;
    return !in_flight_ || in_flight_->empty();
  });
}

void DeviceResources::Release(bool idle) {
  if (idle) {
    if (fence_ != nullptr) driver_.EventDestroy(fence_);
    // Free in stream order: cuMemFree would wait for the whole device, even for NCCL
    // kernels of another communicator that wait for a late rank.
    if (scratch_ != 0) driver_.MemFreeAsync(scratch_, comm_stream_);
    if (words_ != 0) driver_.MemFreeAsync(words_, side_stream_);
    kernels_.reset();
    for (cuda::Stream s : {comm_stream_, side_stream_})
      if (s != nullptr) driver_.StreamDestroy(s);
    in_flight_.reset();
    driver_.DevicePrimaryCtxRelease(ordinal_);
  }
  (void)in_flight_.release();
  (void)kernels_.release();
  fence_ = nullptr;
  scratch_ = words_ = 0;
  comm_stream_ = side_stream_ = nullptr;
}

}  // namespace ringjax
