// EagerRequest: an operation as its caller submits it. EagerBackend: what runs the
// calls of an eager lane on tensors of a device (device/eager_cuda.h).
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

// `outs` is the memory for the results. For allreduce, broadcast and reducescatter it
// has one address for each tensor, which may be that of the input. For allgather and
// alltoall it is empty or has one address for each tensor; a result whose size is not
// exactly that of its memory is then placed in memory of the core, as without `outs`.
// `rooms` is the number of bytes at each of `outs`. It may be empty for operations
// whose results have a known size.
struct EagerRequest {
  Submission what;
  std::vector<void*> ins, outs;
  std::vector<uint64_t> rooms;
  uint64_t stream = 0;   // stream of the submitter, for CUDA tensors
  void* keep = nullptr;  // returned by EndedTasks::Take after the operation
  // Seconds of waiting for other ranks until an error; 0: never; negative: the lane's.
  double timeout = -1;
  // The caller waits for the operation at once, so Submit may do the work of the lane.
  bool waits = false;
};

// Runs calls on tensors of a device. Any thread may call Mark, Abort, Finish and Close;
// only the lane's own thread calls the other functions.
class EagerBackend {
 public:
  virtual ~EagerBackend() = default;
  // Records how far the submitter's stream has got: Run makes the device wait for that
  // point before it uses the tensors. Fails if this backend cannot run the operation.
  virtual Result<std::shared_ptr<DevicePoint>> Mark(const EagerRequest& request) = 0;
  // Connects the ranks the first time. All ranks call Open before each call.
  virtual Status Open() = 0;
  // Allocates memory on the device, filled with copies of `pattern` if that has bytes.
  virtual Result<std::shared_ptr<void>> Allocate(
      uint64_t bytes, std::span<const std::byte> pattern) = 0;
  // Enqueues a call about which all ranks have agreed. `marks`: the points that Mark
  // has returned for this rank's submissions in the call. `*end` becomes the point
  // after which the device no longer uses the tensors, also after an error if there is
  // such a point.
  virtual Status Run(const Call& call,
                     std::span<const std::shared_ptr<DevicePoint>> marks,
                     std::shared_ptr<DevicePoint>* end) = 0;
  virtual void Abort(const Status& status) = 0;
  // Waits a bounded time for the enqueued work. No call may follow.
  virtual void Finish() = 0;
  // Called after the lane's thread has ended, or when the lane leaves the epoch.
  virtual void Close() = 0;
};

// Makes the backend for one epoch of the lane's communicator.
using EagerBackendMaker =
    std::function<std::shared_ptr<EagerBackend>(const std::shared_ptr<Communicator>&)>;

}  // namespace ringjax
