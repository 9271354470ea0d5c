// The three FFI handlers for the CPU: Run, Start, Done. They translate, nothing more.
#include "ffi/handlers.h"
#include "ffi/invocation.h"

namespace ringjax {
namespace {

// The order value of the results: seq, one more if `advance`. Tokens carry nothing.
void PassOrder(const Invocation& it, bool advance) {
  if (!it.order_out) return;
  *static_cast<uint32_t*>(it.order_out) =
      *static_cast<const uint32_t*>(it.order_in) + (advance ? 1 : 0);
}

ffi::Error Run(ffi::RemainingArgs args, ffi::RemainingRets rets,
               ffi::Dictionary attrs) {
  return Invoke(Where::kHost, args, rets, attrs, [](Invocation& it) {
    if (it.first) it.live.overlap->Begin(it.site);
    RJ_TRY(it.live.communicator->Run(it.call));
    PassOrder(it, it.last);
    return OkStatus();
  });
}

ffi::Error Start(ffi::RemainingArgs args, ffi::RemainingRets rets,
                 ffi::Dictionary attrs) {
  return Invoke(Where::kHost, args, rets, attrs, [](Invocation& it) {
    // The results stay as they are: nothing but DONE reads them, which overwrites them.
    if (it.first) it.live.overlap->Begin(it.site);
    RJ_TRY(it.live.overlap->Start(it.call, it.site, it.in_flight));
    PassOrder(it, false);
    return OkStatus();
  });
}

ffi::Error Done(ffi::RemainingArgs args, ffi::RemainingRets rets,
                ffi::Dictionary attrs) {
  return Invoke(Where::kHost, args, rets, attrs, [](Invocation& it) {
    RJ_TRY(it.live.overlap->Done(it.call, it.site));
    PassOrder(it, it.last);
    return OkStatus();
  });
}

XLA_FFI_DEFINE_HANDLER(kRun, Run,
                       ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attrs());
XLA_FFI_DEFINE_HANDLER(kStart, Start,
                       ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attrs());
XLA_FFI_DEFINE_HANDLER(kDone, Done,
                       ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attrs());

}  // namespace

std::vector<std::pair<std::string, void*>> HostHandlers() {
  return {{"ringjax_run", reinterpret_cast<void*>(kRun)},
          {"ringjax_start", reinterpret_cast<void*>(kStart)},
          {"ringjax_done", reinterpret_cast<void*>(kDone)},
          CheckHandler()};
}

}  // namespace ringjax
