// The watchdog of a device communicator: a thread that looks for failures which no call
// reports, and that poisons the device and aborts NCCL once the epoch is aborted.
//
// It looks at the control communicator, at the error state of NCCL, and at the oldest
// operation that has begun on the device.
#pragma once

#include <memory>
#include <thread>

#include "device/consistency_checker.h"
#include "device/device_epoch.h"
#include "device/device_resources.h"
#include "device/nccl_comm.h"
#include "engine/communicator/communicator.h"

namespace ringjax {

// Owned by a CudaCommunicator, which calls Start and Stop once each. LookAround is safe
// from any thread between Start and Stop; the context of the device must be current.
class Watchdog {
 public:
  Watchdog(std::shared_ptr<Communicator> control, const DeviceResources& device,
           DeviceEpoch& epoch, NcclComm& comm);

  // `checker` compares the calls of all ranks, and must live until Stop. Pass null if
  // there is only one rank, or if the caller compares each call before it makes the
  // call (CudaOptions::checks_consistency).
  void Start(ConsistencyChecker* checker);
  void LookAround(ConsistencyChecker* checker);
  // Ends the thread, and aborts NCCL if NCCL has not ended. DeviceEpoch::Stop must have
  // been called before; Start need not have been called.
  void Stop();

 private:
  void Watch(ConsistencyChecker* checker);
  void PoisonAndAbortNccl();  // poison, teardown barrier, ncclCommAbort

  const std::shared_ptr<Communicator> control_;
  const DeviceResources& device_;
  DeviceEpoch& epoch_;
  NcclComm& comm_;
  std::thread thread_;
};

}  // namespace ringjax
