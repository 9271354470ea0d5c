// An ncclComm_t: one NCCL communicator of one device, from its connection to its end.
//
// A thread holds the lock of the handle during each NCCL call, because no thread may be
// in NCCL when another thread aborts the handle. No thread waits with the lock held.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>

#include "device/device_epoch.h"
#include "device/nccl.h"
#include "engine/communicator/communicator.h"

namespace ringjax {

// Owned by a CudaCommunicator. The context of the device must be current. Callers:
// - Connect: the CudaCommunicator, before any other method
// - Group: a thread that holds turn_mutex_ of the CudaCommunicator
// - Finish: CudaCommunicator::Close
// - joined, State, Abort: any thread
class NcclComm {
 public:
  NcclComm(const nccl::Nccl& nccl, std::shared_ptr<Communicator> control,
           const DeviceEpoch& epoch);
  NcclComm(const NcclComm&) = delete;
  NcclComm& operator=(const NcclComm&) = delete;

  // Connects all ranks. Fails after `start_timeout` seconds or once `interrupted` is
  // set.
  Status Connect(const nccl::UniqueId& unique_id, double start_timeout,
                 const std::atomic<bool>& interrupted);

  const nccl::Nccl& nccl() const { return nccl_; }
  // Returns null before Connect and after Finish or Abort. Takes no lock: the body of
  // Group may use the handle, because Group holds the lock.
  nccl::Comm handle() const { return comm_; }
  bool joined();

  // Makes one NCCL group of the operations that `body` issues, and waits until NCCL has
  // launched the group (Settle).
  Status Group(const Call& call, const std::function<Status()>& body);
  nccl::Outcome State();  // the asynchronous error; kSuccess if the handle is null

  bool Finish();  // ends NCCL without an abort; false if that failed or took too long
  void Abort();

 private:
  Status AwaitPeers(nccl::Comm joining, double start_timeout,
                    const std::atomic<bool>& interrupted);
  Status Settle();

  const nccl::Nccl& nccl_;
  const std::shared_ptr<Communicator> control_;
  const DeviceEpoch& epoch_;
  // Guards comm_, and is held during every NCCL call on comm_ (see above). Taken before
  // the mutex of the epoch.
  std::mutex mutex_;
  nccl::Comm comm_ = nullptr;
};

}  // namespace ringjax
