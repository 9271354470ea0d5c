// The path of a call, from the caller to the stream. See cuda_communicator.h.
// Connecting and closing are in cuda_connect.cc, failures in cuda_failure.cc, the
// collectives in cuda_collectives.cc.
#include "device/cuda_communicator.h"

#include <chrono>
#include <exception>

#include "device/current_context.h"
#include "device/reduction.h"

namespace ringjax {
namespace {

using Clock = std::chrono::steady_clock;
constexpr size_t kMostKnown = 512;

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

// The key of a call in known_. Besides the fingerprint it has the properties that ranks
// do not compare but Validate checks: known_ also keeps the result of Validate.
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
    if (current == one->context_ || (current == nullptr && all.size() == 1))
      return one.get();
  return nullptr;
}

Status CudaCommunicator::Admit(const Call& call) const {
  if (aborted()) return Refused(call);
  if (closing_.load(std::memory_order_acquire))
    return control_->WithContext(call,
                                 {Code::kFailedPrecondition, "ringjax is shut down"});
  return OkStatus();
}

const CudaCommunicator::Known& CudaCommunicator::Recall(const Call& call) {
  const uint64_t key = KeyOf(call);
  auto found = known_.find(key);
  if (found == known_.end()) {
    if (known_.size() >= kMostKnown) known_.clear();
    auto known = std::make_unique<Known>();
    auto record = std::make_shared<CallRecord>(call);
    record->fits = control_->Validate(call);
    if (record->fits.ok()) record->fits = CheckReductions(call, size());
    if (record->fits.ok()) {
      FusionOptions fusion = options_.fusion;
      fusion.can_pack = kernels_->available();
      Result<FusionPlan> plan = PlanFusion(call, size(), fusion);
      record->fits = plan.status();
      if (plan.ok()) known->plan = std::move(plan.value());
    }
    known->record = std::move(record);
    found = known_.emplace(key, std::move(known)).first;
  }
  return *found->second;
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
  const CurrentContext current(driver_, context_);
  auto checked = [&](cuda::Outcome outcome, const char* what) {
    const Status status = driver_.Check(outcome, what);
    return status.ok() ? status : FailHere(call, status);
  };
  for (cuda::Event event : after)
    RJ_TRY(checked(driver_.StreamWaitEvent(comm_stream_, event, 0), "StreamWaitEvent"));
  RJ_TRY(Serve(call, comm_stream_, [this](size_t bytes) { return Scratch(bytes); }));
  return checked(driver_.EventRecord(done, comm_stream_), "EventRecord");
}

Status CudaCommunicator::OnCommStream(
    const std::function<Status(cuda::Stream)>& enqueue) {
  std::lock_guard turn(turn_mutex_);
  if (comm_stream_ == nullptr)
    return Status(Code::kFailedPrecondition, "ringjax is shut down");
  const CurrentContext current(driver_, context_);
  return enqueue(comm_stream_);
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

// When a program fails, XLA reuses its buffers as soon as XLA's own stream has passed
// them, while the communication stream may still write to them. So make XLA's stream
// wait. The wait is short: the abort ends the work on the communication stream.
Status CudaCommunicator::Leave(cuda::Stream stream, Status status) {
  if (status.ok() || comm_stream_ == nullptr || stream == comm_stream_) return status;
  const CurrentContext current(driver_, context_);
  if (driver_.EventRecord(fence_, comm_stream_) == cuda::kSuccess)
    driver_.StreamWaitEvent(stream, fence_, 0);
  return status;
}

Status CudaCommunicator::Serve(const Call& call, cuda::Stream stream,
                               const Workspace& workspace) {
  if (Status s = Admit(call); !s.ok()) return s;
  const auto start = Clock::now();
  const CurrentContext current(driver_, context_);
  try {
    const Known& known = Recall(call);
    // A call that this rank cannot make is compared, too: peers may have enqueued their
    // part already, and must learn that this rank refuses.
    if (checker_) checker_->Add(known.record);
    if (!known.record->fits.ok())
      return control_->WithContext(call, known.record->fits);
    Pool pool(driver_, stream);
    const Workspace own = [&pool](size_t bytes) { return pool.Take(bytes); };
    Work work{call, known.plan, stream, workspace ? workspace : own, {}};
    if (Status s = EnqueueTracked(&work); !s.ok()) return FailHere(call, s);
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
    return FailHere(call, Status(Code::kInternal, std::string("failed: ") + e.what()));
  }
}

// Enqueues the call as an in-flight operation, also if the call fails halfway: its
// first part may still run.
Status CudaCommunicator::EnqueueTracked(Work* work) {
  if (size() == 1 && work->plan.segments.empty()) return Enqueue(work);
  RJ_TRY(in_flight_->Begin(work->stream, work->call.op, work->call.Title()));
  const Status enqueued = Enqueue(work);
  const Status ended = in_flight_->End(work->stream);
  if (!ended.ok()) in_flight_->Drop();
  return enqueued.ok() ? ended : enqueued;
}

Status CudaCommunicator::StartOn(Call* call, int64_t site, bool first,
                                 cuda::Stream stream) {
  if (Status s = Admit(*call); !s.ok()) return s;
  const CurrentContext current(driver_, context_);
  Result<Site*> slot = SiteOf(site);
  Status ready = TakeBack(first, site);
  if (ready.ok()) ready = slot.status();
  if (!ready.ok()) return FailHere(*call, ready);
  Site* here = slot.value();
  here->on_stream = !options_.comm_stream;
  here->results.clear();
  auto fork = [&]() -> Status {
    // If operand and result have different memory, XLA may reuse that of the operand as
    // soon as `stream` has passed this call. So copy the operand on `stream`, and let
    // the communication stream use only the result.
    for (Tensor& t : call->tensors) {
      here->results.push_back(t.out);
      if (t.in != t.out && t.bytes() > 0 && t.room >= t.bytes())
        RJ_CUDA(driver_, MemcpyDtoDAsync, cuda::ToPointer(t.out), cuda::ToPointer(t.in),
                t.bytes(), stream);
      t.in = t.out;
    }
    if (here->on_stream) return OkStatus();
    RJ_CUDA(driver_, EventRecord, here->ready, stream);
    RJ_CUDA(driver_, StreamWaitEvent, comm_stream_, here->ready, 0);
    return OkStatus();
  };
  if (Status s = fork(); !s.ok()) return FailHere(*call, s);
  if (here->on_stream) {
    RJ_TRY(Serve(*call, stream, {}));
  } else {
    RJ_TRY(Serve(*call, comm_stream_, [this](size_t bytes) { return Scratch(bytes); }));
    const Status recorded =
        driver_.Check(driver_.EventRecord(here->done, comm_stream_), "cuEventRecord");
    if (!recorded.ok()) return FailHere(*call, recorded);
  }
  here->pending = true;
  return OkStatus();
}

Status CudaCommunicator::DoneOn(const Call& call, int64_t site, cuda::Stream stream) {
  if (Status s = Admit(call); !s.ok()) return s;
  const CurrentContext current(driver_, context_);
  auto found = sites_.find(site);
  if (found == sites_.end() || !found->second.pending)
    return control_->WithContext(
        call, {Code::kFailedPrecondition,
               "DONE of bucket " + std::to_string(site) + " without its START"});
  Site& here = found->second;
  here.pending = false;
  auto join = [&]() -> Status {
    if (!here.on_stream) RJ_CUDA(driver_, StreamWaitEvent, stream, here.done, 0);
    for (size_t i = 0; i < call.tensors.size(); ++i) {
      const Tensor& t = call.tensors[i];
      // The operand of DONE must be the memory in which START left the result. If XLA
      // has copied it in between, the copy was made before the allreduce had ended.
      if (t.bytes() > 0 && (i >= here.results.size() || t.in != here.results[i]))
        return Status(Code::kInternal, "XLA moved tensor " + std::to_string(i) +
                                           " between START and DONE");
      if (t.in != t.out && t.bytes() > 0)
        RJ_CUDA(driver_, MemcpyDtoDAsync, cuda::ToPointer(t.out), cuda::ToPointer(t.in),
                t.bytes(), stream);
    }
    return OkStatus();
  };
  if (Status s = join(); !s.ok()) return FailHere(call, s);
  return OkStatus();
}

// Fails if a bucket of an earlier training step was started and never collected. That
// step failed on this rank only, so the ranks would diverge if it went on. `first`
// begins a new step and looks at all buckets of the chain.
Status CudaCommunicator::TakeBack(bool first, int64_t site) {
  bool stale = false;
  for (auto& [number, s] : sites_) {
    const bool before = first && ChainOf(number) == ChainOf(site);
    stale |= s.pending && (before || number == site);
    if (before) s.pending = false;
  }
  if (!stale) return OkStatus();
  return Status(Code::kUnavailable,
                "started a step and never collected the results of the one before, "
                "which failed between START and DONE");
}

Result<CudaCommunicator::Site*> CudaCommunicator::SiteOf(int64_t site) {
  Site& s = sites_[site];
  for (cuda::Event* event : {&s.ready, &s.done})
    if (*event == nullptr)
      RJ_CUDA(driver_, EventCreate, event, cuda::kEventDisableTiming);
  return &s;
}

// Returns the workspace of the communication stream. One is enough for all calls,
// because a stream runs in order. The memory comes from the driver's pool, so that
// growing it does not wait for the device.
Result<cuda::Pointer> CudaCommunicator::Scratch(size_t bytes) {
  if (bytes > scratch_bytes_) {
    if (scratch_ != 0) RJ_CUDA(driver_, MemFreeAsync, scratch_, comm_stream_);
    scratch_ = 0;
    scratch_bytes_ = 0;
    RJ_CUDA(driver_, MemAllocAsync, &scratch_, bytes, comm_stream_);
    scratch_bytes_ = bytes;
  }
  return scratch_;
}

Status CudaCommunicator::Synchronize(cuda::Stream stream) {
  const CurrentContext current(driver_, context_);
  const auto start = Clock::now();
  for (cuda::Stream s : {stream, comm_stream_}) {
    cuda::Outcome outcome = cuda::kNotReady;
    while (true) {
      if (closing_.load(std::memory_order_acquire)) return Check();
      if (!cuda::MayRun(outcome = driver_.StreamQuery(s))) break;
      if (InterruptCheck check = interrupt_check.load(); check != nullptr && check())
        return Status(Code::kCancelled, control_->Prefix() + "interrupted");
      std::this_thread::sleep_for(
          std::chrono::microseconds(Since(start) < 1e-3 ? 20 : 500));
    }
    RJ_TRY(driver_.Check(outcome, "cuStreamQuery"));
  }
  // Idle streams do not prove that the calls succeeded: NCCL may have an error that the
  // watchdog has not seen yet.
  if (!aborted()) LookAround();
  return Check();
}

std::map<std::string, CudaStats> CudaCommunicator::stats() const {
  std::lock_guard lock(state_mutex_);
  return stats_;
}

}  // namespace ringjax
