// See device_epoch.h.
#include "device/device_epoch.h"

#include <utility>

namespace ringjax {
namespace {

constexpr auto kAbort = std::chrono::seconds(10);  // longer than NCCL's abort takes

}  // namespace

DeviceEpoch::DeviceEpoch(std::shared_ptr<Communicator> control, int device)
    : control_(std::move(control)), device_(device) {}

void DeviceEpoch::AddOtherDevice(const std::shared_ptr<DeviceEpoch>& other) {
  other_devices_.push_back(other);
}

Status DeviceEpoch::Check() const {
  if (!aborted()) return OkStatus();
  std::lock_guard lock(mutex_);
  if (abort_reason_.message().starts_with("RINGJAX[")) return abort_reason_;
  return Status(abort_reason_.code(), control_->Prefix() + abort_reason_.message(),
                abort_reason_.rank());
}

Status DeviceEpoch::Health() const {
  return finished_.load(std::memory_order_acquire) ? OkStatus() : Check();
}

// Returns the reason of the abort as the error of `call`. Adds the name of `call` if
// the reason does not name the operation that failed.
Status DeviceEpoch::Refused(const Call& call) const {
  std::lock_guard lock(mutex_);
  if (abort_reason_.message().starts_with("RINGJAX[")) return abort_reason_;
  return control_->WithContext(call, abort_reason_);
}

// Aborts the epoch on all ranks, because the other ranks would wait forever for this
// rank's part of `call`.
Status DeviceEpoch::FailHere(const Call& call, const Status& status) {
  if (aborted()) return Refused(call);
  const std::string where = other_devices_.empty()
                                ? ""
                                : " (its CUDA device " + std::to_string(device_) + ")";
  control_->AbortAndNotifyPeers(status.code(), status.message() + where);
  Abort(control_->WithContext(call, control_->abort_status()));
  return Refused(call);
}

// Aborts all devices of the process, because a program needs the results of each.
void DeviceEpoch::Abort(const Status& status) {
  AbortThis(status);
  for (const auto& other : other_devices_)
    if (const auto here = other.lock()) here->AbortThis(status);
}

void DeviceEpoch::AbortThis(const Status& status) {
  {
    std::lock_guard lock(mutex_);
    if (!abort_reason_.ok()) return;
    abort_reason_ = status;
    aborted_.store(true, std::memory_order_release);
  }
  changed_.notify_all();
}

bool DeviceEpoch::AwaitAbort(std::chrono::milliseconds tick) {
  std::unique_lock lock(mutex_);
  if (stopping_) return false;
  const bool must_abort = !abort_reason_.ok() && !teardown_begun_;
  if (!must_abort) changed_.wait_for(lock, tick);
  return must_abort || !stopping_;
}

void DeviceEpoch::Stop(bool finished) {
  finished_.store(finished, std::memory_order_release);
  std::lock_guard lock(mutex_);
  // If `finished`, mark the teardown as done: poison would make valid results NaN.
  teardown_begun_ |= finished;
  poisoned_ = poisoned_ || finished;
  stopping_ = true;
}

bool DeviceEpoch::BeginTeardown() {
  std::lock_guard lock(mutex_);
  return !std::exchange(teardown_begun_, true);
}

void DeviceEpoch::SetNcclAborted() {
  std::lock_guard lock(mutex_);
  nccl_aborted_ = true;
  changed_.notify_all();
}

bool DeviceEpoch::IsUnpoisoned() const {
  return (aborted() || control_->aborted()) && !poisoned_;
}

// NCCL may still launch the failed group of operations later, behind work that is
// enqueued after this call. The group would then use memory that its owner has reused.
// Only the abort of NCCL prevents the launch, so wait for the abort, 10 s at most.
Status DeviceEpoch::EndHere(const Call& call, const Status& status) {
  const Status failed = FailHere(call, status);
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, kAbort, [this] { return nccl_aborted_; });
  return failed;
}

}  // namespace ringjax
