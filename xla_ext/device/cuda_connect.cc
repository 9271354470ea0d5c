// Connects and closes a CudaCommunicator: opens its device, NCCL and its threads.
#include <atomic>
#include <chrono>
#include <thread>

#include "device/cuda_communicator.h"
#include "device/current_context.h"
#include "device/eventually.h"

namespace ringjax {
namespace {

constexpr double kForever = 1e9;

}  // namespace

CudaCommunicator::CudaCommunicator(CudaOptions options,
                                   std::shared_ptr<Communicator> control,
                                   const cuda::Driver& driver, const nccl::Nccl& nccl)
    : options_(std::move(options)),
      control_(std::move(control)),
      driver_(driver),
      epoch_(control_, options_.device),
      device_(driver, options_.device),
      nccl_comm_(nccl, control_, epoch_),
      watchdog_(control_, device_, epoch_, nccl_comm_),
      collectives_(control_, device_, nccl_comm_, options_.fusion.mode),
      overlap_(device_, options_.comm_stream) {}

Result<CudaCommunicator::All> CudaCommunicator::Connect(const CudaOptions& options,
                                                        std::span<const Place> places) {
  auto epoch_of = [](const std::shared_ptr<CudaCommunicator>& one) {
    return std::shared_ptr<DeviceEpoch>(one, &one->epoch_);
  };
  All made;
  Status status;
  size_t culprit = 0;
  for (; culprit < places.size(); ++culprit) {
    CudaOptions own = options;
    own.device = places[culprit].device;
    own.timed = culprit == 0;  // one is timed, as all take about equally long
    auto prepared = Prepare(own, places[culprit].control);
    status = prepared.status();
    if (!status.ok()) break;
    for (const auto& other : made) {
      other->epoch_.AddOtherDevice(epoch_of(prepared.value()));
      prepared.value()->epoch_.AddOtherDevice(epoch_of(other));
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
  const bool told = control->aborted();  // a peer aborted; `status` has its reason
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
  const CommunicatorOptions& o = control_->options();
  return device_.Open(
      [recorder = options_.timed ? o.recorder : nullptr, set = o.process_set,
       lane = o.eager ? Lane::kNamed : Lane::kCompiled](Collective op, double seconds) {
        if (recorder) recorder->AddDevice({set, lane, Name(op)}, seconds);
      });
}

Status CudaCommunicator::Join(const nccl::UniqueId& unique_id) {
  const Joining self(this, unique_id);
  size_t culprit = 0;
  RJ_TRY(JoinAll({&self, 1}, &culprit));
  Begin();
  return OkStatus();
}

void CudaCommunicator::Begin() {
  if (control_->size() > 1 && options_.checks_consistency)
    checker_ = std::make_unique<ConsistencyChecker>(
        control_, [this](const Status& s) { epoch_.Abort(s); });
  watchdog_.Start(checker_.get());
}

// Each device connects on a thread of its own, which lives until the device is
// connected or has failed. If NCCL fails early, NCCL leaves the calling thread inside a
// group for good; while NCCL connects, it may use memory of that thread. All devices
// connect at once, so no rank depends on the order in which a peer connects devices.
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
        interrupted = true;  // the other devices are useless without this device
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
  for (const auto& [one, unique_id] : all) one->epoch_.AbortThis(found[first]);
  return found[first];
}

Status CudaCommunicator::JoinNccl(const nccl::UniqueId& unique_id,
                                  const std::atomic<bool>& interrupted) {
  const CurrentContext current(driver_, device_.context());
  return nccl_comm_.Connect(unique_id, options_.start_timeout, interrupted);
}

Status CudaCommunicator::Settled(double seconds) {
  bool idle = false, interrupted = false;
  const bool settled = Eventually(seconds, [&] {
    InterruptCheck check = interrupt_check.load();
    interrupted = check != nullptr && check();
    std::lock_guard turn(turn_mutex_);
    // If `in_flight` is null, Close has released the device.
    InFlight* const in_flight = device_.in_flight();
    idle = !in_flight || ((!checker_ || checker_->Drain(0)) && in_flight->empty());
    return epoch_.aborted() || interrupted || idle;
  });
  RJ_TRY(epoch_.Health());
  if (idle) return OkStatus();
  if (interrupted) return Status(Code::kCancelled, control_->Prefix() + "interrupted");
  return Status(settled ? Code::kInternal : Code::kDeadlineExceeded,
                control_->Prefix() + "what is enqueued on the device does not end");
}

// Confirm needs no time limit: if the control communicator has a collective timeout,
// the watchdog aborts an operation that does not end.
Status CudaCommunicator::Confirm() {
  const CurrentContext current(driver_, device_.context());
  RJ_TRY(Settled(kForever));
  // All work has ended, but NCCL may have an error that the watchdog has not seen yet.
  std::lock_guard turn(turn_mutex_);
  if (device_.in_flight() && !epoch_.aborted()) watchdog_.LookAround(checker_.get());
  return epoch_.Health();
}

// Before it ends NCCL, Finish waits for all enqueued operations, at most for the
// collective timeout, because peers may be late.
bool CudaCommunicator::Finish() {
  const double limit = control_->options().collective_timeout;
  if (!Settled(limit > 0 ? limit : kForever).ok() || epoch_.aborted()) return false;
  return nccl_comm_.Finish();
}

void CudaCommunicator::Close() {
  {
    std::lock_guard lock(state_mutex_);
    if (closed_) return;
    closed_ = true;
  }
  if (device_.context() == nullptr) return;
  const CurrentContext current(driver_, device_.context());
  closing_.store(true, std::memory_order_release);
  // Wait until the running call returns. Later calls find closing_ set and are refused.
  {
    std::lock_guard turn(turn_mutex_);
  }
  const bool finished = !epoch_.aborted() && nccl_comm_.handle() != nullptr && Finish();
  const Status over(Code::kUnavailable, "ringjax is shut down");
  epoch_.Stop(finished);
  epoch_.AbortThis(over);
  if (checker_) control_->Abort(over);
  watchdog_.Stop();
  std::lock_guard turn(turn_mutex_);
  checker_.reset();
  const bool idle = device_.AwaitIdle();
  overlap_.Release(idle);
  device_.Release(idle);
}

CudaCommunicator::~CudaCommunicator() { Close(); }

}  // namespace ringjax
