// One epoch on one device: whether and why it is aborted, and the steps of its
// teardown.
//
// The first failure aborts the epoch on all devices of the process, because a program
// needs the results of each of them. The failure of a call of this rank also aborts the
// control communicator, so that all ranks learn of it.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <vector>

#include "engine/communicator/communicator.h"

namespace ringjax {

// Owned by a CudaCommunicator. Safe from any thread: callers check whether the epoch
// accepts calls and report failures; the watchdog aborts the epoch and tears it down.
class DeviceEpoch {
 public:
  // `device` is the CUDA ordinal, for error texts.
  DeviceEpoch(std::shared_ptr<Communicator> control, int device);

  // Adds the epoch of another device of this process, before any other thread can reach
  // this object.
  void AddOtherDevice(const std::shared_ptr<DeviceEpoch>& other);

  bool aborted() const { return aborted_.load(std::memory_order_acquire); }
  // Returns the reason of the abort, or ok if the epoch is not aborted.
  Status Check() const;
  // Returns ok if the results of all enqueued calls are valid or will be valid.
  Status Health() const;
  Status Refused(const Call& call) const;  // the reason as the error of `call`

  // Aborts the epoch on all devices of this process, unless it is aborted already.
  void Abort(const Status& status);
  void AbortThis(const Status& status);  // aborts the epoch on this device only
  // Aborts the epoch on all ranks, because this rank cannot do its part of `call`.
  // Returns the error for the caller.
  Status FailHere(const Call& call, const Status& status);
  // Like FailHere, for a call that has already issued NCCL operations: also waits for
  // the abort of NCCL.
  Status EndHere(const Call& call, const Status& status);

  // Waits until the epoch is aborted, at most for `tick`. Does not wait if the epoch is
  // aborted and its teardown has not begun. Returns false after Stop.
  bool AwaitAbort(std::chrono::milliseconds tick);
  // Makes AwaitAbort return false. `finished` says that NCCL has ended cleanly after
  // all calls, so all results are valid and no teardown is needed.
  void Stop(bool finished);

  // Record the steps of the teardown: its beginning, the poison on the device, the
  // abort of NCCL. BeginTeardown returns false if the teardown had begun before.
  bool BeginTeardown();
  void SetPoisoned() { poisoned_ = true; }
  void SetNcclAborted();
  bool IsUnpoisoned() const;  // aborted, and the device is not poisoned yet

 private:
  const std::shared_ptr<Communicator> control_;
  const int device_;
  // The epochs of the other devices of this process. Set before any other thread can
  // reach this object.
  std::vector<std::weak_ptr<DeviceEpoch>> other_devices_;

  std::atomic<bool> aborted_{false}, poisoned_{false};
  std::atomic<bool> finished_{false};  // NCCL ended after all calls: results are valid
  mutable std::mutex mutex_;           // guards the rest
  std::condition_variable changed_;
  Status abort_reason_;
  bool teardown_begun_ = false, nccl_aborted_ = false, stopping_ = false;
};

}  // namespace ringjax
