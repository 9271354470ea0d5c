// See eager_cuda.h.
#include "device/eager_cuda.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "cuda/blob.h"
#include "device/reduction.h"

namespace ringjax {

// A point in the work of a stream: of the caller's stream at a submission, or of the
// communication stream at the end of a call.
class EagerCuda::StreamPoint : public DevicePoint {
 public:
  StreamPoint(std::shared_ptr<cuda::DeviceEvent> device_event,
              std::shared_ptr<CudaCommunicator> communicator)
      : device_event_(std::move(device_event)),
        communicator_(std::move(communicator)) {}

  const cuda::DeviceEvent& device_event() const { return *device_event_; }
  int device() const override { return device_event_->context()->device(); }

  bool passed() const override { return device_event_->Passed(); }
  bool failed() const override {
    return communicator_ && !communicator_->epoch().Health().ok();
  }

  Status Delay(uint64_t stream) override {
    if (communicator_) RJ_TRY(communicator_->epoch().Health());
    last_.store(stream, std::memory_order_relaxed);
    return device_event_->Delay(reinterpret_cast<cuda::Stream>(stream));
  }

  // Frees memory of the call in the order of the stream that last waited for this
  // point, because that stream may still read the memory.
  void Free(cuda::Pointer memory) const {
    cuda::PrimaryContext& context = *device_event_->context();
    if (!context.IsHere()) return;
    const auto stream = reinterpret_cast<cuda::Stream>(last_.load());
    // Perhaps no stream has waited for this point yet, so let `stream` wait for it now.
    // If that fails, leak the memory: the call may still write to it.
    if (device_event_->Delay(stream).ok()) context.Free(memory, stream);
  }

 private:
  const std::shared_ptr<cuda::DeviceEvent> device_event_;
  const std::shared_ptr<CudaCommunicator> communicator_;  // null on a caller's stream
  // The stream that last waited for this point; 0 is the default stream.
  std::atomic<uint64_t> last_{0};
};

// Memory for one tensor of the call that ends at `end`.
struct EagerCuda::Block {
  Block(std::shared_ptr<StreamPoint> to, cuda::Pointer at)
      : end(std::move(to)), memory(at) {}
  ~Block() { end->Free(memory); }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  const std::shared_ptr<StreamPoint> end;
  const cuda::Pointer memory;
};

// The message that each rank sends to all ranks before they connect NCCL. If a rank
// cannot take part, the reason follows the struct as text.
struct EagerCuda::Hello {
  int32_t nccl = 0;  // version
  uint32_t fusion = 0, packs = 0, shares = 0;
  uint64_t small = 0;
  std::array<unsigned char, 16> gpu = {};  // UUID
  nccl::UniqueId id = {};                  // made by rank 0
};

EagerCuda::EagerCuda(EagerCudaOptions options, std::shared_ptr<Communicator> host)
    : options_(std::move(options)), host_(std::move(host)) {}

EagerCuda::~EagerCuda() = default;

// -- on the threads that submit ------------------------------------------------------

Status EagerCuda::CheckOperation(const Submission& what) const {
  if (!what.Reduces()) return OkStatus();
  for (const Submission::Piece& piece : what.tensors)
    RJ_TRY(ReductionOf(piece.dtype, ComponentType(piece.dtype), what.reduce_op,
                       host_->size())
               .status());
  return OkStatus();
}

Result<int> EagerCuda::DeviceOf(const EagerRequest& request) const {
  const auto opened = cuda::OpenDriver();
  if (!opened.ok()) return opened.status();
  const cuda::Driver& driver = *opened.value();
  int device = -1;
  for (const auto* places : {&request.ins, &request.outs})
    for (size_t i = 0; i < places->size(); ++i) {
      // An empty tensor, or a result without rows for this rank, has no memory.
      if ((*places)[i] == nullptr || request.what.tensors[i].bytes() == 0) continue;
      int found = -1;
      const cuda::Outcome outcome = driver.PointerGetAttribute(
          &found, cuda::kPointerDevice, cuda::ToPointer((*places)[i]));
      if (outcome != cuda::kSuccess)
        return Status(Code::kInvalidArgument,
                      "tensor " + std::to_string(i) + " is not on a CUDA device: " +
                          driver.Check(outcome, "cuPointerGetAttribute").message());
      if (device >= 0 && found != device)
        return Status(Code::kInvalidArgument,
                      "its tensors are on the CUDA devices " + std::to_string(device) +
                          " and " + std::to_string(found) + " of this rank");
      device = found;
    }
  if (device >= 0) return device;
  if (const auto known = context()) return known->device();
  // All tensors of this rank have been empty so far, so any device will do.
  if (driver.CtxGetDevice(&device) == cuda::kSuccess) return device;
  return std::max(options_.fallback_device, 0);
}

Result<std::shared_ptr<cuda::PrimaryContext>> EagerCuda::ContextOf(int device) {
  std::lock_guard lock(mutex_);
  if (closed_) return Status(Code::kFailedPrecondition, "ringjax is shut down");
  if (!primary_context_) {
    auto opened = cuda::PrimaryContext::Open(device);
    if (!opened.ok()) return opened;
    primary_context_ = std::move(opened.value());
  }
  if (primary_context_->device() == device) return primary_context_;
  return Status(Code::kInvalidArgument,
                "it is on CUDA device " + std::to_string(device) +
                    ", but this rank takes part in this process set with CUDA device " +
                    std::to_string(primary_context_->device()));
}

Result<std::shared_ptr<DevicePoint>> EagerCuda::Mark(const EagerRequest& request) {
  RJ_TRY(CheckOperation(request.what));
  const Result<int> device = DeviceOf(request);
  if (!device.ok()) return device.status();
  const auto on = ContextOf(device.value());
  if (!on.ok()) return on.status();
  auto now = on.value()->Record(reinterpret_cast<cuda::Stream>(request.stream));
  if (!now.ok()) return now.status();
  return std::shared_ptr<DevicePoint>(
      std::make_shared<StreamPoint>(std::move(now.value()), nullptr));
}

// -- connecting NCCL -----------------------------------------------------------------

Status EagerCuda::Open() {
  if (open_) return communicator()->epoch().Check();
  RJ_TRY(failed_);
  Hello hello;
  const Status ready = Prepare(&hello);
  std::string mine(reinterpret_cast<const char*>(&hello), sizeof hello);
  if (!ready.ok()) mine += ready.message().empty() ? "unknown" : ready.message();
  std::vector<std::string> messages;
  RJ_TRY(host_->rounds().Exchange(mine, &messages));
  nccl::UniqueId id;
  if (Status s = CheckPeers(messages, &id); !s.ok()) {
    // The ranks have not begun to connect, so the next Open tries again.
    std::shared_ptr<CudaCommunicator> unused;
    std::lock_guard lock(mutex_);
    unused.swap(communicator_);
    return s;
  }
  failed_ = Connect(id);
  open_ = failed_.ok();
  return failed_;
}

// Prepares the device of this rank, and fills in `hello`, the message to other ranks.
Status EagerCuda::Prepare(Hello* hello) {
  CudaOptions cuda = options_.cuda;
  cuda.checks_consistency = false;
  auto on = context();
  if (!on) {
    if (options_.fallback_device < 0)
      return Status(Code::kFailedPrecondition,
                    "it has joined without tensors, and has no CUDA device");
    const auto opened = ContextOf(options_.fallback_device);
    if (!opened.ok()) return opened.status();
    on = opened.value();
  }
  cuda.device = on->device();
  Status none(Code::kFailedPrecondition, "no NCCL");
  const nccl::Nccl* nccl = nccl::OpenedNccl();
  for (size_t i = 0; i < options_.nccl.size() && nccl == nullptr; ++i) {
    const auto opened = nccl::OpenNccl(options_.nccl[i]);
    if (opened.ok()) nccl = opened.value();
    // Report the error of the first path, which may say why a file cannot be loaded.
    // The error of a later path may only say that the loader finds no NCCL.
    if (i == 0) none = opened.status();
  }
  if (nccl == nullptr) return none;
  hello->nccl = nccl->version;
  hello->fusion = static_cast<uint32_t>(cuda.fusion.mode);
  hello->small = cuda.fusion.small;
  hello->packs = cuda::DeviceImages().empty() ? 0 : 1;
  hello->shares = options_.cuda.shares ? 1 : 0;
  const cuda::Driver& driver = on->driver();
  cuda::Device handle = 0;
  RJ_CUDA(driver, DeviceGet, &handle, cuda.device);
  RJ_CUDA(driver, DeviceGetUuid, hello->gpu.data(), handle);
  auto made = CudaCommunicator::Prepare(std::move(cuda), host_);
  if (!made.ok()) return made.status();
  if (host_->rank() == 0)
    RJ_TRY(nccl->Check(nccl->GetUniqueId(&hello->id), "ncclGetUniqueId"));
  std::lock_guard lock(mutex_);
  communicator_ = std::move(made.value());
  return OkStatus();
}

// Checks whether NCCL can connect the ranks. The result is the same on all ranks,
// because all have received the same messages.
Status EagerCuda::CheckPeers(const std::vector<std::string>& messages,
                             nccl::UniqueId* id) const {
  auto wrong = [this](size_t rank, const std::string& what) {
    const int world = host_->options().world_ranks[rank];
    return Status(Code::kFailedPrecondition,
                  "rank " + std::to_string(world) + " " + what, world);
  };
  std::vector<Hello> hellos(messages.size());
  for (size_t r = 0; r < messages.size(); ++r) {
    if (messages[r].size() < sizeof(Hello)) return wrong(r, "sent half a message");
    std::memcpy(&hellos[r], messages[r].data(), sizeof(Hello));
    if (const std::string why = messages[r].substr(sizeof(Hello)); !why.empty())
      return wrong(r, "cannot take CUDA tensors: " + why);
  }
  const Hello& first = hellos[0];
  for (size_t r = 1; r < hellos.size(); ++r) {
    const Hello& other = hellos[r];
    auto differs = [&](const std::string& what) {
      return wrong(r, "cannot exchange CUDA tensors with rank " +
                          std::to_string(host_->options().world_ranks[0]) + ": " +
                          what);
    };
    if (other.nccl != first.nccl)
      return differs("it has NCCL " + std::to_string(other.nccl) + ", not " +
                     std::to_string(first.nccl) +
                     "; install one version everywhere, or name it by RINGJAX_NCCL");
    if (other.fusion != first.fusion || other.small != first.small)
      return differs(
          "RINGJAX_FUSION or RINGJAX_FUSION_SMALL is not alike on all ranks");
    if (other.packs != first.packs)
      return differs("one build of ringjax has device code, the other has none");
  }
  // NCCL would report a shared GPU only in its own log.
  const auto& place = host_->options().topology.host;
  for (size_t r = 1; r < hellos.size(); ++r)
    for (size_t before = 0; before < r; ++before)
      if (hellos[r].gpu == hellos[before].gpu && place[r] == place[before] &&
          hellos[r].shares == 0 && hellos[before].shares == 0)
        return wrong(r, "computes on the same GPU as rank " +
                            std::to_string(host_->options().world_ranks[before]) +
                            ", and NCCL wants one for each rank");
  *id = first.id;
  return OkStatus();
}

// Connects NCCL, then exchanges the outcome: if one rank has failed, all ranks fail.
Status EagerCuda::Connect(const nccl::UniqueId& id) {
  const auto device = communicator();
  const Status joined = device->Join(id);
  std::vector<std::string> messages;
  const Status told =
      host_->rounds().Exchange(joined.ok()                ? ""
                               : joined.message().empty() ? "failed"
                                                          : joined.message(),
                               &messages);
  Status status = joined;
  for (size_t r = 0; r < messages.size() && told.ok(); ++r) {
    if (messages[r].empty()) continue;
    const int world = host_->options().world_ranks[r];
    status = Status(Code::kFailedPrecondition,
                    "rank " + std::to_string(world) +
                        " could not connect its CUDA device: " + messages[r],
                    world);
    break;
  }
  if (!told.ok()) status = told;
  if (status.ok()) return status;
  device->epoch().Abort(status);
  device->Close();
  return status;
}

// -- calls ---------------------------------------------------------------------------

Result<std::shared_ptr<EagerCuda::StreamPoint>> EagerCuda::EndOfNextCall() {
  if (!next_) {
    auto device_event = context()->Make();
    if (!device_event.ok()) return device_event.status();
    next_ =
        std::make_shared<StreamPoint>(std::move(device_event.value()), communicator());
  }
  return next_;
}

Result<std::shared_ptr<void>> EagerCuda::Allocate(uint64_t bytes,
                                                  std::span<const std::byte> pattern) {
  if (bytes == 0) return std::shared_ptr<void>();
  const auto end = EndOfNextCall();
  if (!end.ok()) return end.status();
  const auto on = context();
  const cuda::Driver& driver = on->driver();
  cuda::Pointer memory = 0;
  const size_t words = (bytes + 3) / 4;
  std::shared_ptr<Block> block;
  const Status made = communicator()->OnCommStream([&](cuda::Stream stream) -> Status {
    RJ_CUDA(driver, MemAllocAsync, &memory, words * 4, stream);
    block = std::make_shared<Block>(end.value(), memory);
    if (pattern.empty()) return OkStatus();
    if (pattern.size() == 1) {
      const unsigned byte = std::to_integer<unsigned>(pattern[0]);
      RJ_CUDA(driver, MemsetD32Async, memory, byte * 0x01010101u, words, stream);
      return OkStatus();
    }
    // The driver has no memset for patterns of eight bytes; only ranks that have joined
    // need this slower copy. The copy returns after it has read `filled`, because that
    // memory is pageable.
    std::vector<std::byte> filled(words * 4);
    for (size_t i = 0; i < filled.size(); ++i) filled[i] = pattern[i % pattern.size()];
    RJ_CUDA(driver, MemcpyHtoDAsync, memory, filled.data(), filled.size(), stream);
    return OkStatus();
  });
  if (!made.ok()) return made;
  return std::shared_ptr<void>(block, reinterpret_cast<void*>(memory));
}

Status EagerCuda::Run(const Call& call,
                      std::span<const std::shared_ptr<DevicePoint>> marks,
                      std::shared_ptr<DevicePoint>* end) {
  const auto here = EndOfNextCall();
  if (!here.ok()) return here.status();
  next_.reset();
  *end = here.value();
  std::vector<cuda::Event> after;
  after.reserve(marks.size());
  for (const auto& mark : marks)
    after.push_back(static_cast<const StreamPoint&>(*mark).device_event().event());
  const cuda::Event done = here.value()->device_event().event();
  const auto device = communicator();
  const Status status = device->RunAfter(call, after, done);
  if (status.ok()) return status;
  // Record the end event after the work that the failed call may have enqueued. If even
  // OnCommStream fails, nothing runs on the stream.
  (void)device->OnCommStream([&](cuda::Stream stream) {
    const cuda::Driver& driver = context()->driver();
    return driver.Check(driver.EventRecord(done, stream), "cuEventRecord");
  });
  return status;
}

void EagerCuda::Abort(const Status& status) {
  if (const auto device = communicator()) device->epoch().Abort(status);
}

void EagerCuda::Finish() {
  if (open_) communicator()->Close();
}

void EagerCuda::Close() {
  Finish();
  next_.reset();
  // Release the primary context after the lock. Works and results may still refer to
  // it.
  std::shared_ptr<cuda::PrimaryContext> released;
  std::lock_guard lock(mutex_);
  released.swap(primary_context_);
  closed_ = true;
}

// -- queries -------------------------------------------------------------------------

std::shared_ptr<CudaCommunicator> EagerCuda::communicator() const {
  std::lock_guard lock(mutex_);
  return communicator_;
}

std::shared_ptr<cuda::PrimaryContext> EagerCuda::context() const {
  std::lock_guard lock(mutex_);
  return primary_context_;
}

Status EagerCuda::Confirm() const {
  const auto device = joined() ? communicator() : nullptr;
  return device ? device->Confirm() : OkStatus();
}

int EagerCuda::device() const {
  const auto on = context();
  return on ? on->device() : -1;
}

std::map<std::string, CudaStats> EagerCuda::stats() const {
  const auto device = communicator();
  return device ? device->stats() : std::map<std::string, CudaStats>();
}

}  // namespace ringjax
