// Connecting and closing: device, NCCL and threads. See cuda_communicator.h.
#include <chrono>

#include "device/cuda_communicator.h"
#include "device/current_context.h"

namespace ringjax {
namespace {

using Clock = std::chrono::steady_clock;
constexpr double kGoodbye = 5;  // seconds for ncclCommFinalize, and for idle streams
constexpr double kForever = 1e9;

// Polls `done` until it returns true, for at most `seconds`. Returns whether it did.
bool Eventually(double seconds, const std::function<bool()>& done) {
  const auto start = Clock::now();
  while (!done()) {
    const double waited = std::chrono::duration<double>(Clock::now() - start).count();
    if (waited > seconds) return false;
    // Poll often at first: a commit of the training state may wait here.
    std::this_thread::sleep_for(std::chrono::microseconds(waited < 1e-3 ? 50 : 1000));
  }
  return true;
}

}  // namespace

CudaCommunicator::CudaCommunicator(CudaOptions options,
                                   std::shared_ptr<Communicator> control,
                                   const cuda::Driver& driver, const nccl::Nccl& nccl)
    : options_(std::move(options)),
      control_(std::move(control)),
      driver_(driver),
      nccl_(nccl) {}

Result<CudaCommunicator::All> CudaCommunicator::Connect(const CudaOptions& options,
                                                        std::span<const Place> places) {
  All made;
  Status status;
  size_t culprit = 0;
  for (; culprit < places.size(); ++culprit) {
    CudaOptions own = options;
    own.device = places[culprit].device;
    own.timed = culprit == 0;  // one device is enough: all take about equal times
    auto prepared = Prepare(own, places[culprit].control);
    status = prepared.status();
    if (!status.ok()) break;
    for (const auto& other : made) {
      other->beside_.push_back(prepared.value());
      prepared.value()->beside_.push_back(other);
    }
    made.push_back(std::move(prepared.value()));
  }
  if (status.ok()) {
    std::vector<Joining> joining;
    for (size_t i = 0; i < made.size(); ++i)
      joining.emplace_back(made[i].get(), places[i].unique_id);
    status = JoinAll(joining, &culprit);
  }
  if (status.ok()) {
    for (const auto& one : made) one->Begin();
    return made;
  }
  // Abort the control communicators. Otherwise the other ranks would wait for this rank
  // until their start timeout.
  const auto& control = places[culprit].control;
  const std::string place =
      "CUDA device " + std::to_string(places[culprit].device) + ": ";
  const bool told = control->aborted();  // by a peer, whose reason is `status`
  const std::string text = (told ? "" : place) + status.message();
  for (const Place& each : places)
    if (!each.control->aborted())
      each.control->AbortAndNotifyPeers(status.code(), text, told ? status.rank() : -1);
  return Status(status.code(), control->Prefix() + text, status.rank());
}

Result<std::shared_ptr<CudaCommunicator>> CudaCommunicator::Prepare(
    CudaOptions options, std::shared_ptr<Communicator> control) {
  const auto driver = cuda::OpenDriver();
  if (!driver.ok()) return driver.status();
  const nccl::Nccl* nccl = nccl::OpenedNccl();
  if (nccl == nullptr)
    return Status(Code::kFailedPrecondition, "NCCL has not been opened");
  std::shared_ptr<CudaCommunicator> made(new CudaCommunicator(
      std::move(options), std::move(control), *driver.value(), *nccl));
  RJ_TRY(made->Open());
  return made;
}

Status CudaCommunicator::Open() {
  RJ_TRY(OpenDevice());
  const CurrentContext current(driver_, context_);
  auto kernels = cuda::Kernels::Load(driver_, options_.device);
  if (!kernels.ok()) return kernels.status();
  kernels_ = std::move(kernels.value());
  const CommunicatorOptions& o = control_->options();
  in_flight_ = std::make_unique<InFlight>(
      driver_, [recorder = options_.timed ? o.recorder : nullptr, set = o.process_set,
                named = o.eager](Collective op, double seconds) {
        if (recorder) recorder->AddDevice({set, named, op}, seconds);
      });
  int least = 0, greatest = 0;
  if (driver_.CtxGetStreamPriorityRange != nullptr)
    RJ_CUDA(driver_, CtxGetStreamPriorityRange, &least, &greatest);
  RJ_CUDA(driver_, StreamCreateWithPriority, &comm_stream_, cuda::kStreamNonBlocking,
          greatest);
  RJ_CUDA(driver_, StreamCreateWithPriority, &side_stream_, cuda::kStreamNonBlocking,
          greatest);
  RJ_CUDA(driver_, EventCreate, &fence_, cuda::kEventDisableTiming);
  constexpr size_t kWords = 64;
  RJ_CUDA(driver_, MemAllocAsync, &words_, kWords * sizeof(unsigned), side_stream_);
  RJ_CUDA(driver_, MemsetD32Async, words_, 0, kWords, side_stream_);
  RJ_CUDA(driver_, StreamSynchronize, side_stream_);
  return OkStatus();
}

Status CudaCommunicator::Join(const nccl::UniqueId& unique_id) {
  const Joining self(this, unique_id);
  size_t culprit = 0;
  RJ_TRY(JoinAll({&self, 1}, &culprit));
  Begin();
  return OkStatus();
}

void CudaCommunicator::Begin() {
  if (size() > 1 && options_.checks_consistency)
    checker_ = std::make_unique<ConsistencyChecker>(
        control_, [this](const Status& s) { AbortEpoch(s); });
  Live(true);
  watchdog_ = std::thread([this] { Watch(); });
}

Status CudaCommunicator::OpenDevice() {
  int count = 0;
  RJ_CUDA(driver_, DeviceGetCount, &count);
  if (options_.device < 0 || options_.device >= count)
    return Status(Code::kInvalidArgument,
                  "there is no such device among " + std::to_string(count));
  cuda::Device device = 0;
  RJ_CUDA(driver_, DeviceGet, &device, options_.device);
  RJ_CUDA(driver_, DevicePrimaryCtxRetain, &context_, device);
  return OkStatus();
}

// Each device connects on a thread of its own, which lives until the device is
// connected or has failed. If NCCL fails early, it leaves the calling thread inside a
// group for good; and while it connects, it may use memory of that thread. The devices
// connect at the same time, so no rank depends on the order of its peers.
Status CudaCommunicator::JoinAll(std::span<const Joining> all, size_t* culprit) {
  std::atomic<bool> interrupted{false};
  std::atomic<size_t> over{0}, first{all.size()};
  std::vector<Status> found(all.size());
  std::vector<std::thread> joiners;
  for (size_t i = 0; i < all.size(); ++i)
    joiners.emplace_back([&, i] {
      const auto& [one, unique_id] = all[i];
      found[i] = one->JoinNccl(unique_id, interrupted);
      size_t none = all.size();
      if (!found[i].ok()) {
        first.compare_exchange_strong(none, i);
        interrupted = true;  // without this device the other ones are of no use
      }
      ++over;
    });
  while (over < all.size()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    InterruptCheck check = interrupt_check.load();
    if (check != nullptr && check()) interrupted = true;
  }
  for (std::thread& joiner : joiners) joiner.join();
  if (first == all.size()) return OkStatus();
  *culprit = first;
  for (const auto& [one, unique_id] : all) one->AbortThis(found[first]);
  return found[first];
}

Status CudaCommunicator::JoinNccl(const nccl::UniqueId& unique_id,
                                  const std::atomic<bool>& interrupted) {
  const CurrentContext current(driver_, context_);
  nccl::Config config;
  nccl::Comm joining = nullptr;
  Status status = nccl_.Check(
      nccl_.CommInitRankConfig(&joining, size(), unique_id, rank(), &config),
      "ncclCommInitRankConfig");
  if (status.ok()) status = AwaitPeers(joining, interrupted);
  if (status.ok())
    comm_ = joining;
  else if (joining != nullptr)
    nccl_.CommAbort(joining);
  return status;
}

Status CudaCommunicator::AwaitPeers(nccl::Comm joining,
                                    const std::atomic<bool>& interrupted) {
  nccl::Outcome outcome = nccl::kSuccess, state = nccl::kInProgress;
  const bool settled = Eventually(options_.start_timeout, [&] {
    outcome = nccl_.CommGetAsyncError(joining, &state);
    return outcome != nccl::kSuccess || state != nccl::kInProgress ||
           control_->aborted() || interrupted;
  });
  if (interrupted) return Status(Code::kCancelled, "interrupted");
  if (control_->aborted()) return control_->abort_status();
  if (!settled)
    return Status(Code::kDeadlineExceeded,
                  "NCCL has not connected " + std::to_string(size()) +
                      " ranks within " +
                      std::to_string(static_cast<int>(options_.start_timeout)) +
                      " s; NCCL_DEBUG=WARN says more, and NCCL_SOCKET_IFNAME chooses "
                      "the network interface");
  RJ_TRY(nccl_.Check(outcome, "ncclCommGetAsyncError"));
  return nccl_.Check(state, "ncclCommInitRankConfig");
}

Status CudaCommunicator::Settled(double seconds) {
  bool idle = false, interrupted = false;
  const bool settled = Eventually(seconds, [&] {
    InterruptCheck check = interrupt_check.load();
    interrupted = check != nullptr && check();
    std::lock_guard turn(turn_mutex_);
    // Without in_flight_ the device has been released.
    idle = !in_flight_ || ((!checker_ || checker_->Drain(0)) && in_flight_->empty());
    return aborted() || interrupted || idle;
  });
  RJ_TRY(Health());
  if (idle) return OkStatus();
  if (interrupted) return Status(Code::kCancelled, control_->Prefix() + "interrupted");
  return Status(settled ? Code::kInternal : Code::kDeadlineExceeded,
                control_->Prefix() + "what is enqueued on the device does not end");
}

// Needs no time limit: if the control communicator has a collective timeout, the
// watchdog aborts an operation that does not end.
Status CudaCommunicator::Confirm() {
  const CurrentContext current(driver_, context_);
  RJ_TRY(Settled(kForever));
  // Operations that have ended may still have failed, see Synchronize.
  std::lock_guard turn(turn_mutex_);
  if (in_flight_ && !aborted()) LookAround();
  return Health();
}

// Waits for all enqueued operations first, at most for the collective timeout, because
// peers may be late. Then ncclCommFinalize flushes the data that peers may still need:
// NCCL's proxy threads may hold bytes after the kernels that produced them have ended.
bool CudaCommunicator::Finish() {
  const double limit = control_->options().collective_timeout;
  if (!Settled(limit > 0 ? limit : kForever).ok() || aborted()) return false;
  nccl::Outcome outcome = nccl::kSuccess, state = nccl::kSuccess;
  {
    std::lock_guard lock(nccl_mutex_);
    if (comm_ == nullptr ||
        !nccl_.Check(nccl_.CommFinalize(comm_), "ncclCommFinalize").ok())
      return false;
  }
  const bool settled = Eventually(kGoodbye, [&] {
    std::lock_guard lock(nccl_mutex_);
    outcome = comm_ == nullptr ? nccl::kInternalError
                               : nccl_.CommGetAsyncError(comm_, &state);
    return outcome != nccl::kSuccess || state != nccl::kInProgress;
  });
  if (!settled || outcome != nccl::kSuccess || state != nccl::kSuccess) return false;
  std::lock_guard lock(nccl_mutex_);
  if (comm_ == nullptr) return false;
  nccl_.CommDestroy(std::exchange(comm_, nullptr));
  return true;
}

void CudaCommunicator::Close() {
  {
    std::lock_guard lock(state_mutex_);
    if (closed_) return;
    closed_ = true;
  }
  if (context_ == nullptr) return;
  const CurrentContext current(driver_, context_);
  closing_.store(true, std::memory_order_release);
  // Wait for the call that is being served. Later calls find closing_ set.
  {
    std::lock_guard turn(turn_mutex_);
  }
  const bool finished = !aborted() && comm_ != nullptr && Finish();
  finished_.store(finished, std::memory_order_release);
  const Status over(Code::kUnavailable, "ringjax is shut down");
  {
    std::lock_guard lock(state_mutex_);
    // If NCCL has ended in good order, nothing is poisoned: results must stay valid.
    teardown_begun_ |= finished;
    poisoned_ = poisoned_ || finished;
    stopping_ = true;
  }
  AbortThis(over);
  if (checker_) control_->Abort(over);
  if (watchdog_.joinable()) watchdog_.join();
  PoisonAndAbortNccl();
  Live(false);
  std::lock_guard turn(turn_mutex_);
  checker_.reset();
  ReleaseDevice();
}

void CudaCommunicator::ReleaseDevice() {
  // Work behind an aborted operation, on any stream, may still use the events, memory
  // and kernels of this object. If that work does not end in time, they are leaked:
  // releasing them would wait for the device without a limit.
  const bool idle = Eventually(kGoodbye, [&] {
    for (cuda::Stream s : {comm_stream_, side_stream_})
      if (s != nullptr && cuda::MayRun(driver_.StreamQuery(s))) return false;
    return !in_flight_ || in_flight_->empty();
  });
  if (idle) {
    for (auto& [number, site] : sites_)
      for (cuda::Event e : {site.ready, site.done})
        if (e != nullptr) driver_.EventDestroy(e);
    if (fence_ != nullptr) driver_.EventDestroy(fence_);
    // Free in the order of the streams: cuMemFree would wait for the whole device, also
    // for NCCL kernels of another communicator that wait for a late rank.
    if (scratch_ != 0) driver_.MemFreeAsync(scratch_, comm_stream_);
    if (words_ != 0) driver_.MemFreeAsync(words_, side_stream_);
    kernels_.reset();
    for (cuda::Stream s : {comm_stream_, side_stream_})
      if (s != nullptr) driver_.StreamDestroy(s);
    in_flight_.reset();
    driver_.DevicePrimaryCtxRelease(options_.device);
  }
  sites_.clear();
  (void)in_flight_.release();
  (void)kernels_.release();
  fence_ = nullptr;
  scratch_ = words_ = 0;
  comm_stream_ = side_stream_ = nullptr;
}

CudaCommunicator::~CudaCommunicator() { Close(); }

}  // namespace ringjax
