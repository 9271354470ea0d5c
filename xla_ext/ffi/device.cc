// The FFI handlers for CUDA: Run, Start, Done and Order. They run on the thread on
// which XLA launches the program, enqueue work in the order of XLA's stream and never
// wait for the device. The order value stays on the device: the handlers copy it, and
// only the program itself increments it.
//
// XLA has one such thread for each device of a program. Each thread makes the calls of
// its own device only, so these handlers need no rendezvous of the devices.
#include "ffi/handlers.h"
#include "ffi/invocation.h"

namespace ringjax {
namespace {

// Returns the communicator of the device whose CUDA context XLA has made current. Fails
// if there is none, because the program was placed on another GPU.
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

// Runs `body` with the communicator of this device, and then copies the order value.
template <typename Body>
ffi::Error OnDevice(cuda::Stream stream, const ffi::RemainingArgs& args,
                    const ffi::RemainingRets& rets, const ffi::Dictionary& attrs,
                    const Body& body) {
  return Invoke(Where::kDevice, args, rets, attrs, [&](Invocation& it) {
    const auto here = Here(it);
    RJ_TRY(here.status());
    RJ_TRY(body(*here.value(), it));
    return PassOrder(it, stream);
  });
}

ffi::Error RunOnDevice(cuda::Stream stream, ffi::ScratchAllocator scratch,
                       ffi::RemainingArgs args, ffi::RemainingRets rets,
                       ffi::Dictionary attrs) {
  // XLA owns this memory, and may reuse it once the stream has passed this call. The
  // kernels need 16-byte alignment, which is the most that XLA guarantees.
  const auto workspace = [&](size_t bytes) -> Result<cuda::Pointer> {
    const auto memory = scratch.Allocate(bytes, 16);
    if (memory.has_value()) return cuda::ToPointer(*memory);
    return Status(Code::kInternal, "XLA has no " + std::to_string(bytes) +
                                       " bytes of device memory left");
  };
  return OnDevice(stream, args, rets, attrs, [&](CudaCommunicator& c, Invocation& it) {
    return c.Run(it.call, stream, workspace);
  });
}

ffi::Error StartOnDevice(cuda::Stream stream, ffi::RemainingArgs args,
                         ffi::RemainingRets rets, ffi::Dictionary attrs) {
  return OnDevice(stream, args, rets, attrs, [&](CudaCommunicator& c, Invocation& it) {
    return c.Start(std::move(it.call), it.site, it.first, stream);
  });
}

ffi::Error DoneOnDevice(cuda::Stream stream, ffi::RemainingArgs args,
                        ffi::RemainingRets rets, ffi::Dictionary attrs) {
  return OnDevice(stream, args, rets, attrs, [&](CudaCommunicator& c, Invocation& it) {
    return c.Done(it.call, it.site, stream);
  });
}

// Converts a token to the order value 0, or an order value to a token.
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

// The handlers do not have the trait that lets XLA capture them in a command buffer (a
// CUDA graph): the graph would keep the NCCL communicator of an epoch that has ended.
auto OnStream() { return ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cuda::Stream>>(); }
XLA_FFI_DEFINE_HANDLER(
    kDeviceRun, RunOnDevice,
    OnStream().Ctx<ffi::ScratchAllocator>().RemainingArgs().RemainingRets().Attrs());
XLA_FFI_DEFINE_HANDLER(kDeviceStart, StartOnDevice,
                       OnStream().RemainingArgs().RemainingRets().Attrs());
XLA_FFI_DEFINE_HANDLER(kDeviceDone, DoneOnDevice,
                       OnStream().RemainingArgs().RemainingRets().Attrs());
XLA_FFI_DEFINE_HANDLER(kDeviceOrder, OrderOnDevice,
                       OnStream().RemainingArgs().RemainingRets());

}  // namespace

std::vector<std::pair<std::string, void*>> DeviceHandlers() {
  return {{"ringjax_run", reinterpret_cast<void*>(kDeviceRun)},
          {"ringjax_start", reinterpret_cast<void*>(kDeviceStart)},
          {"ringjax_done", reinterpret_cast<void*>(kDeviceDone)},
          {"ringjax_order", reinterpret_cast<void*>(kDeviceOrder)}};
}

}  // namespace ringjax
