// The FFI handlers for the CPU: Run, Start, Done and Order; and Meet, which is Run,
// Start or Done in a program over several devices. The handlers only call the core.
#include <cstring>

#include "ffi/handlers.h"
#include "ffi/invocation.h"

namespace ringjax {
namespace {

// Copies seq, the order value, to the result, plus one if `advance`. Does nothing if
// the order value is a token (`out` is null): a token has no data.
void PassOrder(const void* in, void* out, bool advance) {
  if (!out) return;
  *static_cast<uint32_t*>(out) = *static_cast<const uint32_t*>(in) + (advance ? 1 : 0);
}

ffi::Error Run(ffi::RemainingArgs args, ffi::RemainingRets rets,
               ffi::Dictionary attrs) {
  return Invoke(Where::kHost, args, rets, attrs, [](Invocation& it) {
    if (it.first) it.live.overlap->Begin(it.site);
    RJ_TRY(it.live.communicator->Run(it.call));
    PassOrder(it.order_in, it.order_out, it.last);
    return OkStatus();
  });
}

ffi::Error Start(ffi::RemainingArgs args, ffi::RemainingRets rets,
                 ffi::Dictionary attrs) {
  return Invoke(Where::kHost, args, rets, attrs, [](Invocation& it) {
    // START leaves its results unwritten: only DONE takes them, and overwrites them.
    if (it.first) it.live.overlap->Begin(it.site);
    RJ_TRY(it.live.overlap->Start(it.call, it.site, it.in_flight));
    PassOrder(it.order_in, it.order_out, false);
    return OkStatus();
  });
}

ffi::Error Done(ffi::RemainingArgs args, ffi::RemainingRets rets,
                ffi::Dictionary attrs) {
  return Invoke(Where::kHost, args, rets, attrs, [](Invocation& it) {
    RJ_TRY(it.live.overlap->Done(it.call, it.site));
    PassOrder(it.order_in, it.order_out, it.last);
    return OkStatus();
  });
}

enum class Action { kRun, kStart, kDone };

// Returns Part::body; null if the communicator runs the call itself. Each call takes
// the order value that the previous call of the program has returned, so the bodies run
// one after the other.
std::function<Status(uint64_t, const Call&)> BodyOf(Action action,
                                                    const Invocation& it) {
  const auto begin = [overlap = it.live.overlap, first = it.first, site = it.site] {
    if (first) overlap->Begin(site);
  };
  switch (action) {
    case Action::kRun:
      if (!it.first) return nullptr;
      return [begin, c = it.live.communicator](uint64_t ticket, const Call& call) {
        begin();
        return c->RunInTurn(ticket, call);
      };
    case Action::kStart:
      return [begin, overlap = it.live.overlap, site = it.site,
              in_flight = it.in_flight](uint64_t, const Call& call) {
        begin();
        return overlap->Start(call, site, in_flight);
      };
    case Action::kDone:
      break;
  }
  return [overlap = it.live.overlap, site = it.site](uint64_t, const Call& call) {
    return overlap->Done(call, site);
  };
}

// Never waits: another device may need this thread for its part (DeviceRendezvous). XLA
// keeps the buffers, the attributes and the memory of the program until the future is
// set, even if another part of the program has failed meanwhile.
template <Action kAction>
ffi::Future Meet(int32_t device, ffi::RunId run, ffi::RemainingArgs args,
                 ffi::RemainingRets rets, ffi::Dictionary attrs) {
  ffi::Promise promise;
  ffi::Future future(promise);
  const auto list = [&](std::string_view name) {
    const auto span = attrs.get<ffi::Span<const int64_t>>(name);
    return span.has_value() ? std::vector<int64_t>(span->begin(), span->end())
                            : std::vector<int64_t>();
  };
  ffi::Error problem = Invoke(Where::kHost, args, rets, attrs, [&](Invocation& it) {
    Part part;
    part.communicator = it.live.communicator;
    part.device = device;
    part.run = run.run_id;
    part.devices = list("devices");
    part.shards = list("shards");
    part.done = [promise, in = it.order_in, out = it.order_out,
                 advance = it.last &&
                           kAction != Action::kStart](const Status& status) mutable {
      if (!status.ok()) return promise.SetError(ToError(status));
      PassOrder(in, out, advance);
      promise.SetAvailable();
    };
    part.call = std::move(it.call);
    part.wants_turn = kAction == Action::kRun;
    part.body = BodyOf(kAction, it);
    return it.live.meeting->Join(std::move(part));
  });
  if (problem.failure()) promise.SetError(std::move(problem));
  return future;
}

// Converts a token to the order value 0, or an order value to a token.
ffi::Error Order(ffi::RemainingArgs, ffi::RemainingRets rets) {
  auto number = rets.get<ffi::AnyBuffer>(0);
  if (number.has_value() && (*number)->element_type() == ffi::DataType::U32)
    std::memset((*number)->untyped_data(), 0, (*number)->size_bytes());
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(kRun, Run,
                       ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attrs());
XLA_FFI_DEFINE_HANDLER(kStart, Start,
                       ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attrs());
XLA_FFI_DEFINE_HANDLER(kDone, Done,
                       ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attrs());
XLA_FFI_DEFINE_HANDLER(kOrder, Order, ffi::Ffi::Bind().RemainingArgs().RemainingRets());

auto OfOneDevice() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::DeviceOrdinal>()
      .Ctx<ffi::RunId>()
      .RemainingArgs()
      .RemainingRets()
      .Attrs();
}

XLA_FFI_DEFINE_HANDLER(kMeet, Meet<Action::kRun>, OfOneDevice());
XLA_FFI_DEFINE_HANDLER(kMeetStart, Meet<Action::kStart>, OfOneDevice());
XLA_FFI_DEFINE_HANDLER(kMeetDone, Meet<Action::kDone>, OfOneDevice());

}  // namespace

std::vector<std::pair<std::string, void*>> HostHandlers() {
  std::vector<std::pair<std::string, void*>> all = CheckHandlers();
  for (auto& handler : ExactHandlers()) all.push_back(std::move(handler));
  all.insert(all.end(), {{"ringjax_run", reinterpret_cast<void*>(kRun)},
                         {"ringjax_start", reinterpret_cast<void*>(kStart)},
                         {"ringjax_done", reinterpret_cast<void*>(kDone)},
                         {"ringjax_meet", reinterpret_cast<void*>(kMeet)},
                         {"ringjax_meet_start", reinterpret_cast<void*>(kMeetStart)},
                         {"ringjax_meet_done", reinterpret_cast<void*>(kMeetDone)},
                         {"ringjax_order", reinterpret_cast<void*>(kOrder)}});
  return all;
}

}  // namespace ringjax
