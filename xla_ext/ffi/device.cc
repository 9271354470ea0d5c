// The same three handlers for CUDA: Run, Start, Done. They run on XLA's launching
// thread, enqueue on XLA's stream and never wait for the device. The order value stays
// on the device, where only XLA counts it: handlers hand it on.
#include "ffi/handlers.h"
#include "ffi/invocation.h"

namespace ringjax {
namespace {

// XLA has the context of its device current; another one than ours means that the
// program was placed on another GPU.
Status CheckPlace(const Invocation& it) {
  if (it.live.device->InContext()) return OkStatus();
  return Status(Code::kInvalidArgument,
                it.live.communicator->Prefix() + it.call.Title() +
                    ": the program runs on another GPU than CUDA device " +
                    std::to_string(it.live.device->options().device) +
                    ", which this rank joined NCCL with");
}

Status PassOrder(const Invocation& it, cuda::Stream stream) {
  if (it.order_out == it.order_in) return OkStatus();
  const auto driver = cuda::OpenDriver();
  if (!driver.ok()) return driver.status();
  RJ_CUDA(*driver.value(), MemcpyDtoDAsync, cuda::ToPointer(it.order_out),
          cuda::ToPointer(it.order_in), sizeof(uint32_t), stream);
  return OkStatus();
}

ffi::Error Run(cuda::Stream stream, ffi::ScratchAllocator scratch,
               ffi::RemainingArgs args, ffi::RemainingRets rets,
               ffi::Dictionary attrs) {
  return Invoke(Where::kDevice, args, rets, attrs, [&](Invocation& it) {
    RJ_TRY(CheckPlace(it));
    RJ_TRY(it.live.device->Run(
        it.call, stream, [&](size_t bytes) -> Result<cuda::Pointer> {
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

ffi::Error Start(cuda::Stream stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                 ffi::Dictionary attrs) {
  return Invoke(Where::kDevice, args, rets, attrs, [&](Invocation& it) {
    RJ_TRY(CheckPlace(it));
    RJ_TRY(it.live.device->Start(std::move(it.call), it.site, it.first, stream));
    return PassOrder(it, stream);
  });
}

ffi::Error Done(cuda::Stream stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                ffi::Dictionary attrs) {
  return Invoke(Where::kDevice, args, rets, attrs, [&](Invocation& it) {
    RJ_TRY(CheckPlace(it));
    RJ_TRY(it.live.device->Done(it.call, it.site, stream));
    return PassOrder(it, stream);
  });
}

// No command-buffer trait: an epoch may be aborted and replaced, a captured graph not.
XLA_FFI_DEFINE_HANDLER(kRun, Run,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cuda::Stream>>()
                           .Ctx<ffi::ScratchAllocator>()
                           .RemainingArgs()
                           .RemainingRets()
                           .Attrs());
XLA_FFI_DEFINE_HANDLER(kStart, Start,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cuda::Stream>>()
                           .RemainingArgs()
                           .RemainingRets()
                           .Attrs());
XLA_FFI_DEFINE_HANDLER(kDone, Done,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cuda::Stream>>()
                           .RemainingArgs()
                           .RemainingRets()
                           .Attrs());

}  // namespace

std::vector<std::pair<std::string, void*>> DeviceHandlers() {
  return {{"ringjax_run", reinterpret_cast<void*>(kRun)},
          {"ringjax_start", reinterpret_cast<void*>(kStart)},
          {"ringjax_done", reinterpret_cast<void*>(kDone)}};
}

}  // namespace ringjax
