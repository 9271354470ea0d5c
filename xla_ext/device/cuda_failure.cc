// The watchdog, and the abort of an epoch on a device. See cuda_communicator.h.
#include <algorithm>
#include <chrono>
#include <mutex>
#include <set>

#include "base/failpoint.h"
#include "device/cuda_communicator.h"
#include "device/current_context.h"

namespace ringjax {
namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kTick = std::chrono::milliseconds(50);
constexpr auto kAbort = std::chrono::seconds(10);  // longer than any abort takes
constexpr double kTogether = 2;                    // seconds to wait before an abort

// The communicators of this process that are connected and not closed.
std::mutex& living_mutex = *new std::mutex;
auto& living = *new std::set<const CudaCommunicator*>;

}  // namespace

Status CudaCommunicator::Check() const {
  if (!aborted()) return OkStatus();
  std::lock_guard lock(state_mutex_);
  if (abort_reason_.message().starts_with("RINGJAX[")) return abort_reason_;
  return Status(abort_reason_.code(), control_->Prefix() + abort_reason_.message(),
                abort_reason_.rank());
}

Status CudaCommunicator::Health() const {
  return finished_.load(std::memory_order_acquire) ? OkStatus() : Check();
}

// Returns the reason of the abort as the error of `call`. Adds the name of `call` if
// the reason does not name the operation that failed.
Status CudaCommunicator::Refused(const Call& call) const {
  std::lock_guard lock(state_mutex_);
  if (abort_reason_.message().starts_with("RINGJAX[")) return abort_reason_;
  return control_->WithContext(call, abort_reason_);
}

// Aborts the epoch on all ranks, because this rank cannot do its part of `call` and the
// parts of the other ranks would never end. Returns the error for the caller.
Status CudaCommunicator::FailHere(const Call& call, const Status& status) {
  if (aborted()) return Refused(call);
  const std::string where =
      beside_.empty() ? ""
                      : " (its CUDA device " + std::to_string(options_.device) + ")";
  control_->AbortAndNotifyPeers(status.code(), status.message() + where);
  AbortEpoch(control_->WithContext(call, control_->abort_status()));
  return Refused(call);
}

void CudaCommunicator::Abort(const Status& status) { AbortEpoch(status); }

// All devices of the process abort: a program needs the results of each of them.
void CudaCommunicator::AbortEpoch(const Status& status) {
  AbortThis(status);
  for (const auto& other : beside_)
    if (const auto here = other.lock()) here->AbortThis(status);
}

void CudaCommunicator::AbortThis(const Status& status) {
  {
    std::lock_guard lock(state_mutex_);
    if (!abort_reason_.ok()) return;
    abort_reason_ = status;
    aborted_.store(true, std::memory_order_release);
  }
  state_changed_.notify_all();
}

void CudaCommunicator::Watch() {
  const CurrentContext current(driver_, context_);
  std::unique_lock lock(state_mutex_);
  while (!stopping_) {
    const bool must_abort = !abort_reason_.ok() && !teardown_begun_;
    if (!must_abort) {
      state_changed_.wait_for(lock, kTick);
      if (stopping_) break;
    }
    lock.unlock();
    if (aborted()) {
      PoisonAndAbortNccl();
    } else {
      LookAround();
    }
    lock.lock();
  }
}

void CudaCommunicator::LookAround() {
  if (control_->aborted()) return AbortEpoch(control_->abort_status());
  nccl::Outcome state = nccl::kSuccess;
  {
    std::lock_guard lock(nccl_mutex_);
    if (comm_ != nullptr) nccl_.CommGetAsyncError(comm_, &state);
  }
  if (state != nccl::kSuccess && state != nccl::kInProgress) {
    // NCCL does not report which rank caused the error. Wait 1 s at most for the
    // heartbeat, which aborts the control communicator when it finds a lost rank.
    for (int i = 0; i < 100 && !control_->aborted(); ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    if (!control_->aborted())
      control_->AbortAndNotifyPeers(
          Code::kUnavailable,
          "met an error of " + nccl_.Check(state, "NCCL").message());
    return AbortEpoch(control_->abort_status());
  }
  // While calls are not compared, a peer may be late. The timeout of the control
  // communicator covers that time; the timeout on the device begins afterwards.
  if (checker_ && !checker_->Drain(0)) return in_flight_->Restart();
  const double limit = control_->options().collective_timeout;
  const auto oldest = in_flight_->Look();
  if (oldest && limit > 0 && oldest->seconds > limit) {
    control_->AbortAndNotifyPeers(
        Code::kDeadlineExceeded,
        "has waited on its device for " + oldest->title +
            ", which does not end though every rank has called it");
    AbortEpoch(control_->abort_status());
  }
}

bool CudaCommunicator::IsUnpoisoned() const {
  return (aborted() || control_->aborted()) && !poisoned_;
}

void CudaCommunicator::Live(bool alive) const {
  std::lock_guard lock(living_mutex);
  if (alive)
    living.insert(this);
  else
    living.erase(this);
}

void CudaCommunicator::AwaitOtherDevices() const {
  const auto limit = Clock::now() + std::chrono::duration<double>(kTogether);
  while (Clock::now() < limit) {
    {
      std::lock_guard lock(living_mutex);
      if (std::ranges::none_of(living,
                               [](const auto* one) { return one->IsUnpoisoned(); }))
        return;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

void CudaCommunicator::PoisonAndAbortNccl() {
  {
    std::lock_guard lock(state_mutex_);
    if (teardown_begun_) return;
    teardown_begun_ = true;
  }
  (void)AtFailpoint(Failpoint::kDeviceAborted);
  // Set the poison word before the abort: the kernels behind an NCCL kernel that the
  // abort ends early must find the word set. A device that does not execute even this
  // memset within two seconds computes nothing any more.
  if (driver_.MemsetD32Async(words_, 1, 1, side_stream_) == cuda::kSuccess)
    for (int i = 0; i < 2000; ++i) {
      if (!cuda::MayRun(driver_.StreamQuery(side_stream_))) break;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  poisoned_ = true;
  bool joined = false;
  {
    std::lock_guard lock(nccl_mutex_);
    joined = comm_ != nullptr;
  }
  // ncclCommAbort frees memory that kernels of other ranks of the host may still use.
  // It also waits for all kernels of this process, and may block the driver for other
  // threads meanwhile. So wait until all live ranks, and all aborted communicators of
  // this process, have set their poison words and are ready for the abort; for a
  // limited time, because some rank may never get here.
  if (joined) {
    control_->heartbeat().AwaitTeardown(kTogether);
    AwaitOtherDevices();
  }
  {
    // ncclCommAbort may return before NCCL has finished: NCCL may continue the abort on
    // a thread of its own. The handle must not be used after this call.
    std::lock_guard lock(nccl_mutex_);
    if (comm_ != nullptr) nccl_.CommAbort(std::exchange(comm_, nullptr));
  }
  std::lock_guard lock(state_mutex_);
  nccl_aborted_ = true;
  state_changed_.notify_all();
}

// NCCL may launch a group that has not settled at any later time, behind work that is
// enqueued after this call. The group would then use memory that its owner has reused.
// Only the abort of NCCL excludes that, so wait for the abort, 10 s at most.
Status CudaCommunicator::EndHere(const Call& call, const Status& status) {
  const Status failed = FailHere(call, status);
  std::unique_lock lock(state_mutex_);
  state_changed_.wait_for(lock, kAbort, [this] { return nccl_aborted_; });
  return failed;
}

}  // namespace ringjax
