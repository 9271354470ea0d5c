// Takes a call from its caller to the stream. The functions that connect and close a
// CudaCommunicator are in cuda_connect.cc.
#include "device/cuda_communicator.h"

#include <chrono>
#include <exception>

#include "device/current_context.h"
#include "device/reduction.h"

namespace ringjax {
namespace {

using Clock = std::chrono::steady_clock;

double Since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Memory from the driver's pool for one call, freed in the order of the stream.
class Pool {
 public:
  Pool(const cuda::Driver& driver, cuda::Stream stream)
      : driver_(driver), stream_(stream) {}
  ~Pool() {
    if (memory_ != 0) driver_.MemFreeAsync(memory_, stream_);
  }
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  Result<cuda::Pointer> Take(size_t bytes) {
    RJ_CUDA(driver_, MemAllocAsync, &memory_, bytes, stream_);
    return memory_;
  }

 private:
  const cuda::Driver& driver_;
  const cuda::Stream stream_;
  cuda::Pointer memory_ = 0;
};

constexpr size_t kMaxKnownCalls = 512;

// Returns the key of a call in known_calls_, whose entries keep the result of Validate.
// So the key also covers the properties that Validate checks and that the fingerprint
// does not contain.
uint64_t KeyOf(const Call& call) {
  uint64_t key = Fingerprint(call);
  auto add = [&key](uint64_t word) { key = (key ^ word) * 0x100000001b3ull; };
  for (int64_t rows : call.rows) add(static_cast<uint64_t>(rows));
  for (const Tensor& t : call.tensors) add(t.room);
  return key;
}

}  // namespace

CudaCommunicator* CudaCommunicator::Here(const All& all) {
  cuda::Context current = nullptr;
  if (all.empty() || all[0]->driver_.CtxGetCurrent(&current) != cuda::kSuccess)
    return nullptr;
  for (const auto& one : all)
    if (current == one->device_.context() || (current == nullptr && all.size() == 1))
      return one.get();
  return nullptr;
}

Status CudaCommunicator::Admit(const Call& call) const {
  if (epoch_.aborted()) return epoch_.Refused(call);
  if (closing_.load(std::memory_order_acquire))
    return control_->WithContext(call,
                                 {Code::kFailedPrecondition, "ringjax is shut down"});
  return OkStatus();
}

Status CudaCommunicator::Run(const Call& call, cuda::Stream stream,
                             const Workspace& workspace) {
  std::lock_guard turn(turn_mutex_);
  return Leave(stream, Serve(call, stream, workspace));
}

Status CudaCommunicator::RunAfter(const Call& call, std::span<const cuda::Event> after,
                                  cuda::Event done) {
  std::lock_guard turn(turn_mutex_);
  RJ_TRY(Admit(call));
  const CurrentContext current(driver_, device_.context());
  auto checked = [&](cuda::Outcome outcome, const char* what) {
    const Status status = driver_.Check(outcome, what);
    return status.ok() ? status : epoch_.FailHere(call, status);
  };
  for (cuda::Event event : after)
    RJ_TRY(checked(driver_.StreamWaitEvent(device_.comm_stream(), event, 0),
                   "StreamWaitEvent"));
  RJ_TRY(ServeOnCommStream(call));
  return checked(driver_.EventRecord(done, device_.comm_stream()), "EventRecord");
}

Status CudaCommunicator::OnCommStream(
    const std::function<Status(cuda::Stream)>& enqueue) {
  std::lock_guard turn(turn_mutex_);
  if (device_.comm_stream() == nullptr)
    return Status(Code::kFailedPrecondition, "ringjax is shut down");
  const CurrentContext current(driver_, device_.context());
  return enqueue(device_.comm_stream());
}

Status CudaCommunicator::Start(Call call, int64_t site, bool first,
                               cuda::Stream stream) {
  std::lock_guard turn(turn_mutex_);
  return Leave(stream, StartOn(&call, site, first, stream));
}

Status CudaCommunicator::Done(const Call& call, int64_t site, cuda::Stream stream) {
  std::lock_guard turn(turn_mutex_);
  return Leave(stream, DoneOn(call, site, stream));
}

// When a program fails, XLA reuses the buffers of the program as soon as XLA's own
// stream has passed the call, while the communication stream may still write to them.
// So make XLA's stream wait for the communication stream, whose work the abort ends.
Status CudaCommunicator::Leave(cuda::Stream stream, Status status) {
  if (status.ok() || device_.comm_stream() == nullptr ||
      stream == device_.comm_stream())
    return status;
  const CurrentContext current(driver_, device_.context());
  device_.Delay(stream);
  return status;
}

const CudaCommunicator::KnownCall& CudaCommunicator::Recall(const Call& call) {
  const uint64_t key = KeyOf(call);
  auto found = known_calls_.find(key);
  if (found == known_calls_.end()) {
    if (known_calls_.size() >= kMaxKnownCalls) known_calls_.clear();
    auto known = std::make_unique<KnownCall>();
    auto record = std::make_shared<CallRecord>(call);
    record->fits = control_->Validate(call);
    if (record->fits.ok()) record->fits = CheckReductions(call, control_->size());
    if (record->fits.ok()) {
      FusionOptions fusion = options_.fusion;
      fusion.can_pack = device_.kernels().available();
      Result<FusionPlan> plan = PlanFusion(call, control_->size(), fusion);
      record->fits = plan.status();
      if (plan.ok()) known->plan = std::move(plan.value());
    }
    known->record = std::move(record);
    found = known_calls_.emplace(key, std::move(known)).first;
  }
  return *found->second;
}

Status CudaCommunicator::Serve(const Call& call, cuda::Stream stream,
                               const Workspace& workspace) {
  if (Status s = Admit(call); !s.ok()) return s;
  const auto start = Clock::now();
  const CurrentContext current(driver_, device_.context());
  try {
    const KnownCall& known = Recall(call);
    // A call that this rank cannot make is compared, too: peers may have enqueued their
    // part already, and must learn that this rank refuses.
    if (checker_) checker_->Add(known.record);
    if (!known.record->fits.ok())
      return control_->WithContext(call, known.record->fits);
    Pool pool(driver_, stream);
    const Workspace own = [&pool](size_t bytes) { return pool.Take(bytes); };
    Work work{call, known.plan, stream, workspace ? workspace : own, {}};
    if (Status s = EnqueueTracked(&work); !s.ok()) return epoch_.FailHere(call, s);
    std::lock_guard lock(state_mutex_);
    CudaStats& total = stats_[std::string(Name(call.op))];
    ++total.calls;
    for (const Tensor& t : call.tensors) total.bytes += t.bytes();
    total.packed_bytes += work.used.packed_bytes;
    total.launches += work.used.launches;
    total.nccl_ops += work.used.nccl_ops;
    total.seconds += Since(start);
    return OkStatus();
  } catch (const std::exception& e) {
    return epoch_.FailHere(call,
                           Status(Code::kInternal, std::string("failed: ") + e.what()));
  }
}

Status CudaCommunicator::ServeOnCommStream(const Call& call) {
  return Serve(call, device_.comm_stream(),
               [this](size_t bytes) { return device_.Scratch(bytes); });
}

// Enqueues the call as an in-flight operation. A call that fails halfway is in
// flight, too, because the operations that it has enqueued may still run.
Status CudaCommunicator::EnqueueTracked(Work* work) {
  if (control_->size() == 1 && work->plan.segments.empty()) return Enqueue(work);
  RJ_TRY(device_.in_flight()->Begin(work->stream, work->call.op, work->call.Title()));
  const Status enqueued = Enqueue(work);
  const Status ended = device_.in_flight()->End(work->stream);
  if (!ended.ok()) device_.in_flight()->Drop();
  return enqueued.ok() ? ended : enqueued;
}

Status CudaCommunicator::Enqueue(Work* work) {
  Status status = collectives_.Enqueue(work);
  if (work->unsettled) status = epoch_.EndHere(work->call, status);
  return status;
}

Status CudaCommunicator::StartOn(Call* call, int64_t site, bool first,
                                 cuda::Stream stream) {
  if (Status s = Admit(*call); !s.ok()) return s;
  const CurrentContext current(driver_, device_.context());
  const auto forked = overlap_.Fork(call, site, first, stream);
  if (!forked.ok()) return epoch_.FailHere(*call, forked.status());
  CudaOverlap::Site* here = forked.value();
  if (here->on_stream) {
    RJ_TRY(Serve(*call, stream, {}));
  } else {
    RJ_TRY(ServeOnCommStream(*call));
  }
  if (Status s = overlap_.Started(here); !s.ok()) return epoch_.FailHere(*call, s);
  return OkStatus();
}

Status CudaCommunicator::DoneOn(const Call& call, int64_t site, cuda::Stream stream) {
  if (Status s = Admit(call); !s.ok()) return s;
  const CurrentContext current(driver_, device_.context());
  const CudaOverlap::Site* here = overlap_.Collect(site);
  if (here == nullptr)
    return control_->WithContext(
        call, {Code::kFailedPrecondition,
               "DONE of bucket " + std::to_string(site) + " without its START"});
  if (Status s = overlap_.Join(*here, call, stream); !s.ok())
    return epoch_.FailHere(call, s);
  return OkStatus();
}

Status CudaCommunicator::Synchronize(cuda::Stream stream) {
  const CurrentContext current(driver_, device_.context());
  const auto start = Clock::now();
  for (const bool communication : {false, true}) {
    cuda::Outcome outcome = cuda::kNotReady;
    while (true) {
      {
        // Close sets closing_, and then locks turn_mutex_ to release the streams.
        std::lock_guard turn(turn_mutex_);
        if (closing_.load(std::memory_order_acquire)) return epoch_.Check();
        outcome = driver_.StreamQuery(communication ? device_.comm_stream() : stream);
      }
      if (!cuda::MayRun(outcome)) break;
      if (InterruptCheck check = interrupt_check.load(); check != nullptr && check())
        return Status(Code::kCancelled, control_->Prefix() + "interrupted");
      std::this_thread::sleep_for(
          std::chrono::microseconds(Since(start) < 1e-3 ? 20 : 500));
    }
    RJ_TRY(driver_.Check(outcome, "cuStreamQuery"));
  }
  // Idle streams do not prove that the calls succeeded: NCCL may have an error that the
  // watchdog has not seen yet. The lock keeps Close from releasing objects that
  // LookAround uses.
  std::lock_guard turn(turn_mutex_);
  if (device_.in_flight() && !epoch_.aborted()) watchdog_.LookAround(checker_.get());
  return epoch_.Check();
}

std::map<std::string, CudaStats> CudaCommunicator::stats() const {
  std::lock_guard lock(state_mutex_);
  return stats_;
}

}  // namespace ringjax
