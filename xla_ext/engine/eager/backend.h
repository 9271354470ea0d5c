// EagerRequest: an operation as its caller submits it. EagerBackend: the interface that
// runs the calls of an eager lane on tensors of a device (device/eager_cuda.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "base/status.h"
#include "engine/call/descriptor.h"
#include "engine/communicator/communicator.h"
#include "engine/eager/submission.h"
#include "engine/eager/work.h"

namespace ringjax {

// One operation with the memory of its tensors.
struct EagerRequest {
  Submission what;
  std::vector<void*> ins;  // one address for each tensor
  // The memory for the results. For allreduce, broadcast and reducescatter, one address
  // for each tensor, which may be the address of the input. For allgather and alltoall,
  // empty or one address for each tensor. A result whose size is not exactly that of
  // its memory goes into memory of the core, as it does without `outs`.
  std::vector<void*> outs;
  // The bytes of memory at each of `outs`. May be empty for operations whose results
  // have a known size.
  std::vector<uint64_t> rooms;
  uint64_t stream = 0;   // stream of the submitter, for CUDA tensors
  void* keep = nullptr;  // returned by EndedTasks::Take after the operation
  // Seconds of waiting for other ranks until the operation fails; 0 means never, and a
  // negative number means the timeout of the lane.
  double timeout = -1;
  // Whether the caller waits for the operation immediately. Then Submit itself may do
  // the work of the lane.
  bool waits = false;
};

// Runs calls on tensors of a device. Any thread may call Mark, Abort, Finish and Close.
// Only the lane's own thread calls the other functions.
class EagerBackend {
 public:
  virtual ~EagerBackend() = default;
  // Records a point in the submitter's stream, behind the work submitted so far. Run
  // makes the device wait for that point before it uses the tensors. Fails if this
  // backend cannot run the operation.
  virtual Result<std::shared_ptr<DevicePoint>> Mark(const EagerRequest& request) = 0;
  // Connects the ranks when it is called first. All ranks call Open before each call.
  virtual Status Open() = 0;
  // Allocates memory on the device, and fills it with copies of `pattern` unless that
  // is empty.
  virtual Result<std::shared_ptr<void>> Allocate(
      uint64_t bytes, std::span<const std::byte> pattern) = 0;
  // Enqueues a call about which all ranks have agreed. `marks` are the points that Mark
  // has returned for this rank's submissions in the call. `*end` receives the point
  // after which the device no longer uses the tensors. After an error it is set only if
  // the device may still use them.
  virtual Status Run(const Call& call,
                     std::span<const std::shared_ptr<DevicePoint>> marks,
                     std::shared_ptr<DevicePoint>* end) = 0;
  virtual void Abort(const Status& status) = 0;
  // Waits a limited time until the enqueued work has ended. No call may follow.
  virtual void Finish() = 0;
  // Called after the lane's thread has ended, or when the lane leaves the epoch.
  virtual void Close() = 0;
};

// Makes the backend for one epoch of the lane's communicator.
using EagerBackendMaker =
    std::function<std::shared_ptr<EagerBackend>(const std::shared_ptr<Communicator>&)>;

}  // namespace ringjax
