// The same three handlers for CUDA: Run, Start, Done. They run on XLA's launching
// thread, enqueue on XLA's stream and never wait for the device. The order value stays
// on the device, where only XLA counts it: handlers hand it on.
//
// A program over several devices has such a thread for each, and each calls for its
// own device only: they need not meet, and none waits for another one.
#include "ffi/handlers.h"
#include "ffi/invocation.h"

namespace ringjax {
namespace {

// XLA has the context of its device current; another one than ours means that the
// program was placed on another GPU.
Result<CudaCommunicator*> Here(const Invocation& it) {
  if (CudaCommunicator* here = CudaCommunicator::Here(it.live.devices)) return here;
  std::string devices;
  for (const auto& one : it.live.devices)
    devices += (devices.empty() ? "" : ", ") + std::to_string(one->options().device);
  return Status(Code::kInvalidArgument,
                it.live.communicator->Prefix() + it.call.Title() +
                    ": the program runs on another GPU than CUDA device " + devices +
                    ", which this rank joined NCCL with; see RINGJAX_DEVICES_PER_RANK");
}

Status PassOrder(const Invocation& it, cuda::Stream stream) {
  if (it.order_out == it.order_in) return OkStatus();
  const auto driver = cuda::OpenDriver();
  if (!driver.ok()) return driver.status();
  RJ_CUDA(*driver.value(), MemcpyDtoDAsync, cuda::ToPointer(it.order_out),
          cuda::ToPointer(it.order_in), sizeof(uint32_t), stream);
  return OkStatus();
}

ffi::Error RunOnDevice(cuda::Stream stream, ffi::ScratchAllocator scratch,
                       ffi::RemainingArgs args, ffi::RemainingRets rets,
                       ffi::Dictionary attrs) {
  return Invoke(Where::kDevice, args, rets, attrs, [&](Invocation& it) {
    const auto here = Here(it);
    RJ_TRY(here.status());
    RJ_TRY(
        here.value()->Run(it.call, stream, [&](size_t bytes) -> Result<cuda::Pointer> {
          // XLA's arena: free again when the stream has passed this call. XLA refuses
          // to promise more than 16 bytes of alignment, which is what the kernels need.
          const auto memory = scratch.Allocate(bytes, 16);
          if (memory.has_value()) return cuda::ToPointer(*memory);
          return Status(Code::kInternal, "XLA has no " + std::to_string(bytes) +
                                             " bytes of device memory left");
        }));
    return PassOrder(it, stream);
  });
}

ffi::Error StartOnDevice(cuda::Stream stream, ffi::RemainingArgs args,
                         ffi::RemainingRets rets, ffi::Dictionary attrs) {
  return Invoke(Where::kDevice, args, rets, attrs, [&](Invocation& it) {
    const auto here = Here(it);
    RJ_TRY(here.status());
    RJ_TRY(here.value()->Start(std::move(it.call), it.site, it.first, stream));
    return PassOrder(it, stream);
  });
}

ffi::Error DoneOnDevice(cuda::Stream stream, ffi::RemainingArgs args,
                        ffi::RemainingRets rets, ffi::Dictionary attrs) {
  return Invoke(Where::kDevice, args, rets, attrs, [&](Invocation& it) {
    const auto here = Here(it);
    RJ_TRY(here.status());
    RJ_TRY(here.value()->Done(it.call, it.site, stream));
    return PassOrder(it, stream);
  });
}

// From a token to a number that stands for it, and back: both only order.
ffi::Error OrderOnDevice(cuda::Stream stream, ffi::RemainingArgs,
                         ffi::RemainingRets rets) {
  auto number = rets.get<ffi::AnyBuffer>(0);
  if (!number.has_value() || (*number)->element_type() != ffi::DataType::U32)
    return ffi::Error::Success();
  const auto driver = cuda::OpenDriver();
  if (!driver.ok()) return ToError(driver.status());
  return ToError(driver.value()->Check(
      driver.value()->MemsetD32Async(cuda::ToPointer((*number)->untyped_data()), 0,
                                     (*number)->element_count(), stream),
      "MemsetD32Async"));
}

// No command-buffer trait: an epoch may be aborted and replaced, a captured graph not.
XLA_FFI_DEFINE_HANDLER(kDeviceRun, RunOnDevice,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cuda::Stream>>()
                           .Ctx<ffi::ScratchAllocator>()
                           .RemainingArgs()
                           .RemainingRets()
                           .Attrs());
XLA_FFI_DEFINE_HANDLER(kDeviceStart, StartOnDevice,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cuda::Stream>>()
                           .RemainingArgs()
                           .RemainingRets()
                           .Attrs());
XLA_FFI_DEFINE_HANDLER(kDeviceDone, DoneOnDevice,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cuda::Stream>>()
                           .RemainingArgs()
                           .RemainingRets()
                           .Attrs());
XLA_FFI_DEFINE_HANDLER(kDeviceOrder, OrderOnDevice,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cuda::Stream>>()
                           .RemainingArgs()
                           .RemainingRets());

}  // namespace

std::vector<std::pair<std::string, void*>> DeviceHandlers() {
  return {{"ringjax_run", reinterpret_cast<void*>(kDeviceRun)},
          {"ringjax_start", reinterpret_cast<void*>(kDeviceStart)},
          {"ringjax_done", reinterpret_cast<void*>(kDeviceDone)},
          {"ringjax_order", reinterpret_cast<void*>(kDeviceOrder)}};
}

}  // namespace ringjax
