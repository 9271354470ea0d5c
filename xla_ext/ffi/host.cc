// The three FFI handlers for the CPU: Run, Start, Done. They translate, nothing more:
// attributes and buffers to a Call, a Status to an ffi::Error.
//
// Operands: x_0..x_{n-1}, an order operand (u32[1] or a token), perhaps a tie that only
// orders. Results: y_0..y_{n-1} and the order value. Every op of every kind comes
// through here, so adding an op adds no handler.
#include <atomic>
#include <cstring>
#include <exception>
#include <map>
#include <mutex>
#include <string>

#include "ffi/handlers.h"
#include "ffi/registry.h"
#include "xla/ffi/api/ffi.h"

namespace ringjax {
namespace {

namespace ffi = ::xla::ffi;

// Never destroyed: threads of XLA may outlive static objects at exit, and a forked
// child has what is registered but not the threads that its destructors would wait for.
std::mutex& registry_mutex = *new std::mutex;
auto& registry = *new std::map<int64_t, Registered>;
std::atomic<FailureHook> failure_hook{nullptr};

ffi::Error ToError(const Status& status) {
  ffi::ErrorCode code = ffi::ErrorCode::kInternal;
  switch (status.code()) {
    case Code::kOk:
      return ffi::Error::Success();
    case Code::kInvalidArgument:
      code = ffi::ErrorCode::kInvalidArgument;
      break;
    case Code::kFailedPrecondition:
      code = ffi::ErrorCode::kFailedPrecondition;
      break;
    case Code::kMismatch:
      code = ffi::ErrorCode::kAborted;
      break;
    case Code::kDeadlineExceeded:
      code = ffi::ErrorCode::kDeadlineExceeded;
      break;
    case Code::kUnavailable:
      code = ffi::ErrorCode::kUnavailable;
      break;
    case Code::kCancelled:
      code = ffi::ErrorCode::kCancelled;
      break;
    case Code::kInternal:
      break;
  }
  if (FailureHook hook = failure_hook.load()) hook();
  return ffi::Error(code, status.message());
}

Status BadCall(const std::string& what) {
  return Status(Code::kInvalidArgument, "RINGJAX[?]: " + what);
}

bool ToDType(ffi::DataType type, DType* out) {
  switch (type) {
    case ffi::DataType::PRED:
      *out = DType::kBool;
      return true;
    case ffi::DataType::S8:
      *out = DType::kI8;
      return true;
    case ffi::DataType::S16:
      *out = DType::kI16;
      return true;
    case ffi::DataType::S32:
      *out = DType::kI32;
      return true;
    case ffi::DataType::S64:
      *out = DType::kI64;
      return true;
    case ffi::DataType::U8:
      *out = DType::kU8;
      return true;
    case ffi::DataType::U16:
      *out = DType::kU16;
      return true;
    case ffi::DataType::U32:
      *out = DType::kU32;
      return true;
    case ffi::DataType::U64:
      *out = DType::kU64;
      return true;
    case ffi::DataType::F16:
      *out = DType::kF16;
      return true;
    case ffi::DataType::BF16:
      *out = DType::kBF16;
      return true;
    case ffi::DataType::F32:
      *out = DType::kF32;
      return true;
    case ffi::DataType::F64:
      *out = DType::kF64;
      return true;
    case ffi::DataType::C64:
      *out = DType::kC64;
      return true;
    case ffi::DataType::C128:
      *out = DType::kC128;
      return true;
    default:
      return false;
  }
}

// One invocation: its buffers, its attributes, the communicator it names.
class Invocation {
 public:
  Invocation(const ffi::RemainingArgs& args, const ffi::RemainingRets& rets,
             const ffi::Dictionary& attrs)
      : args_(args), rets_(rets), attrs_(attrs) {}

  Status Load() {
    const int64_t id = Int("comm");
    live = Find(id);
    if (!live.communicator)
      return Status(Code::kFailedPrecondition,
                    "RINGJAX[" + std::to_string(id) +
                        "]: " + std::string(Text("name")) +
                        ": no such communicator: ringjax is shut down, or its process "
                        "set was removed");
    if (Status s = call.SetKinds(Int("op"), Int("reduce_op"), Int("wire")); !s.ok())
      return BadCall(s.message());
    call.prescale = Float("prescale");
    call.postscale = Float("postscale");
    call.root = static_cast<int>(Int("root"));
    call.name = Text("name");
    call.names = Text("names");
    site = Int("site");
    first = Int("first") != 0;
    last = Int("last") != 0;
    const int64_t size = Int("size");
    if (size != 0 && size != live.communicator->size())
      return Status(Code::kFailedPrecondition,
                    live.communicator->Prefix() + call.Title() + " was compiled for " +
                        std::to_string(size) + " ranks, there are " +
                        std::to_string(live.communicator->size()) +
                        " now: trace it again");
    if (auto counts = attrs_.get<ffi::Span<const int64_t>>("counts");
        counts.has_value())
      call.rows.assign(counts->begin(), counts->end());
    if (failed_) return BadCall("an attribute is missing");
    return LoadBuffers();
  }

  // Where XLA did not alias an operand with its result, the result starts as a copy.
  void PassThrough() const {
    for (const Tensor& t : call.tensors)
      if (t.in != t.out && t.bytes() > 0) std::memcpy(t.out, t.in, t.bytes());
  }

  // The order value of the results: seq, one more if `advance`. Tokens carry nothing.
  void PassOrder(bool advance) const {
    if (!order_out_) return;
    const uint32_t value = *static_cast<const uint32_t*>(order_in_) + (advance ? 1 : 0);
    *static_cast<uint32_t*>(order_out_) = value;
  }

  Registered live;
  Call call;
  int64_t site = 0;
  bool first = false, last = false;

 private:
  Status LoadBuffers() {
    if (rets_.size() == 0 || args_.size() < rets_.size())
      return BadCall("a handler was given too few buffers");
    const size_t n = rets_.size() - 1;
    call.tensors.reserve(n);
    for (size_t i = 0; i < n; ++i) {
      auto in = args_.get<ffi::AnyBuffer>(i);
      auto out = rets_.get<ffi::AnyBuffer>(i);
      if (!in.has_value() || !out.has_value()) return BadCall("a buffer is unreadable");
      Tensor& t = call.tensors.emplace_back();
      if (!ToDType(in->element_type(), &t.dtype))
        return Status(Code::kInvalidArgument,
                      live.communicator->Prefix() + call.Title() + ": tensor " +
                          std::to_string(i) +
                          " has an element type that cannot be sent");
      const auto dims = in->dimensions();
      t.dims.assign(dims.begin(), dims.end());
      t.in = in->untyped_data();
      t.out = (*out)->untyped_data();
      t.room = (*out)->size_bytes();
    }
    auto order_in = args_.get<ffi::AnyBuffer>(n);
    auto order_out = rets_.get<ffi::AnyBuffer>(n);
    if (!order_in.has_value() || !order_out.has_value())
      return BadCall("the order operand is unreadable");
    if (order_in->element_type() == ffi::DataType::U32 &&
        order_in->element_count() == 1) {
      order_in_ = order_in->untyped_data();
      order_out_ = (*order_out)->untyped_data();
      call.step = *static_cast<const uint32_t*>(order_in_);
    }
    return OkStatus();
  }

  int64_t Int(std::string_view name) { return Get<int64_t>(name); }
  double Float(std::string_view name) { return Get<double>(name); }
  std::string_view Text(std::string_view name) { return Get<std::string_view>(name); }

  template <typename T>
  T Get(std::string_view name) {
    auto value = attrs_.get<T>(name);
    failed_ |= !value.has_value();
    return value.has_value() ? *value : T{};
  }

  const ffi::RemainingArgs& args_;
  const ffi::RemainingRets& rets_;
  const ffi::Dictionary& attrs_;
  void *order_in_ = nullptr, *order_out_ = nullptr;
  bool failed_ = false;
};

// Loads an invocation and lets `body` run it. No exception reaches XLA, which is C from
// here on.
template <typename Body>
ffi::Error Invoke(const ffi::RemainingArgs& args, const ffi::RemainingRets& rets,
                  const ffi::Dictionary& attrs, Body&& body) {
  try {
    Invocation invocation(args, rets, attrs);
    Status status = invocation.Load();
    if (status.ok()) status = body(invocation);
    return ToError(status);
  } catch (const std::exception& e) {
    return ToError(Status(Code::kInternal, std::string("RINGJAX[?]: ") + e.what()));
  }
}

ffi::Error Run(ffi::RemainingArgs args, ffi::RemainingRets rets,
               ffi::Dictionary attrs) {
  return Invoke(args, rets, attrs, [](Invocation& it) {
    RJ_TRY(it.live.communicator->Run(it.call));
    it.PassOrder(true);
    return OkStatus();
  });
}

ffi::Error Start(ffi::RemainingArgs args, ffi::RemainingRets rets,
                 ffi::Dictionary attrs) {
  return Invoke(args, rets, attrs, [](Invocation& it) {
    RJ_TRY(it.live.overlap->Start(it.call, it.site, it.first));
    it.PassThrough();
    it.PassOrder(false);
    return OkStatus();
  });
}

ffi::Error Done(ffi::RemainingArgs args, ffi::RemainingRets rets,
                ffi::Dictionary attrs) {
  return Invoke(args, rets, attrs, [](Invocation& it) {
    RJ_TRY(it.live.overlap->Done(it.call, it.site));
    it.PassOrder(it.last);
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
          {"ringjax_done", reinterpret_cast<void*>(kDone)}};
}

void Register(int64_t id, Registered entry) {
  Registered old;  // dies after the lock is gone: it may join a thread
  std::lock_guard lock(registry_mutex);
  std::swap(old, registry[id]);
  registry[id] = std::move(entry);
}

void Unregister(int64_t id) {
  Registered old;
  std::lock_guard lock(registry_mutex);
  if (auto found = registry.find(id); found != registry.end()) {
    old = std::move(found->second);
    registry.erase(found);
  }
}

Registered Find(int64_t id) {
  std::lock_guard lock(registry_mutex);
  auto found = registry.find(id);
  return found == registry.end() ? Registered{} : found->second;
}

void SetFailureHook(FailureHook hook) { failure_hook.store(hook); }

}  // namespace ringjax
