// See invocation.h. Also implements registry.h.
#include "ffi/invocation.h"

#include <algorithm>
#include <atomic>
#include <iterator>
#include <map>
#include <mutex>

namespace ringjax {
namespace {

// Never destroyed: threads of XLA may outlive static objects at exit, and in a forked
// child the destructors of the entries would wait for threads that do not exist there.
std::mutex& registry_mutex = *new std::mutex;
auto& registry = *new std::map<int64_t, Registered>;
std::atomic<FailureHook> failure_hook{nullptr};

// The number of attributes that every call has; attributes() in xla/primitive.py makes
// these attributes. A call with a timeout of its own, or over several devices, has more
// attributes.
constexpr size_t kUsualAttributes = 15;

Status BadCall(const std::string& what) {
  return Status(Code::kInvalidArgument, "RINGJAX[?]: " + what);
}

// XLA's element type for each DType, and XLA's error code for each Code.
constexpr ffi::DataType kXlaTypes[kDTypeCount] = {
    ffi::DataType::PRED, ffi::DataType::S8,  ffi::DataType::S16,  ffi::DataType::S32,
    ffi::DataType::S64,  ffi::DataType::U8,  ffi::DataType::U16,  ffi::DataType::U32,
    ffi::DataType::U64,  ffi::DataType::F16, ffi::DataType::BF16, ffi::DataType::F32,
    ffi::DataType::F64,  ffi::DataType::C64, ffi::DataType::C128};
constexpr ffi::ErrorCode kXlaCodes[] = {ffi::ErrorCode::kOk,
                                        ffi::ErrorCode::kInvalidArgument,
                                        ffi::ErrorCode::kFailedPrecondition,
                                        ffi::ErrorCode::kAborted,
                                        ffi::ErrorCode::kDeadlineExceeded,
                                        ffi::ErrorCode::kUnavailable,
                                        ffi::ErrorCode::kCancelled,
                                        ffi::ErrorCode::kInternal};

bool ToDType(ffi::DataType type, DType* out) {
  const auto found = std::find(std::begin(kXlaTypes), std::end(kXlaTypes), type);
  *out = static_cast<DType>(found - std::begin(kXlaTypes));
  return found != std::end(kXlaTypes);
}

}  // namespace

ffi::Error ToError(const Status& status) {
  if (status.ok()) return ffi::Error::Success();
  if (FailureHook hook = failure_hook.load()) hook();
  return ffi::Error(kXlaCodes[static_cast<size_t>(status.code())], status.message());
}

Status Invocation::Load() {
  const int64_t id = Int("comm");
  live = Find(id);
  if (!live.communicator)
    return Status(Code::kFailedPrecondition,
                  "RINGJAX[" + std::to_string(id) + "]: " + std::string(Text("name")) +
                      ": no such communicator: ringjax is shut down, or its process "
                      "set was removed");
  if (where_ == Where::kDevice && live.devices.empty())
    return Status(
        Code::kFailedPrecondition,
        live.communicator->Prefix() + std::string(Text("name")) +
            ": the ranks are not joined by NCCL: ringjax.init() found no CUDA "
            "device, or its communicator was closed");
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
  in_flight = static_cast<uint64_t>(Int("in_flight"));
  const int64_t size = Int("size");
  if (size != 0 && size != live.communicator->size())
    return Status(Code::kFailedPrecondition,
                  live.communicator->Prefix() + call.Title() + " was compiled for " +
                      std::to_string(size) + " ranks, there are " +
                      std::to_string(live.communicator->size()) +
                      " now: trace it again");
  if (auto counts = attrs_.get<ffi::Span<const int64_t>>("counts"); counts.has_value())
    call.rows.assign(counts->begin(), counts->end());
  // Most calls have no optional attribute, and need no search in the dictionary.
  if (attrs_.size() > kUsualAttributes) {
    if (auto timeout = attrs_.get<double>("timeout"); timeout.has_value())
      call.timeout = *timeout;
    if (auto partition = attrs_.get<std::string_view>("partition");
        partition.has_value())
      call.partition = *partition;
  }
  if (failed_) return BadCall("an attribute is missing");
  return LoadBuffers();
}

Status Invocation::LoadBuffers() {
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
                        std::to_string(i) + " has an element type that cannot be sent");
    const auto dims = in->dimensions();
    t.dims.assign(dims.begin(), dims.end());
    t.in = in->untyped_data();
    t.out = (*out)->untyped_data();
    t.room = (*out)->size_bytes();
  }
  auto before = args_.get<ffi::AnyBuffer>(n);
  auto after = rets_.get<ffi::AnyBuffer>(n);
  if (!before.has_value() || !after.has_value())
    return BadCall("the order operand is unreadable");
  if (before->element_type() == ffi::DataType::U32 && before->element_count() == 1) {
    order_in = before->untyped_data();
    order_out = (*after)->untyped_data();
    if (where_ == Where::kHost) {
      call.step = *static_cast<const uint32_t*>(order_in);
      call.bucket = BucketOf(site);
    }
  }
  return OkStatus();
}

void Register(int64_t id, Registered entry) {
  Registered old;  // destroyed without the lock: its destructor may join a thread
  std::lock_guard lock(registry_mutex);
  std::swap(old, registry[id]);
  registry[id] = std::move(entry);
}

void Unregister(int64_t id, const Communicator* communicator) {
  Registered old;  // destroyed without the lock, as in Register
  std::lock_guard lock(registry_mutex);
  const auto found = registry.find(id);
  if (found == registry.end() || found->second.communicator.get() != communicator)
    return;
  old = std::move(found->second);
  registry.erase(found);
}

Registered Find(int64_t id) {
  std::lock_guard lock(registry_mutex);
  auto found = registry.find(id);
  return found == registry.end() ? Registered{} : found->second;
}

void SetDevices(int64_t id, CudaCommunicator::All devices) {
  CudaCommunicator::All old = std::move(devices);  // destroyed without the lock
  std::lock_guard lock(registry_mutex);
  if (auto found = registry.find(id); found != registry.end())
    std::swap(found->second.devices, old);
}

void SetFailureHook(FailureHook hook) { failure_hook.store(hook); }

}  // namespace ringjax
