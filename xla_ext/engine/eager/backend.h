// EagerRequest: an operation as its caller submits it. EagerBackend: the interface
// through which an eager lane runs calls on tensors of a device (device/eager_cuda.h).
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

// An operation as its caller submits it, with the addresses of its tensors.
struct EagerRequest {
  Submission what;
  ShortVector<void*, 1> ins;  // one address for each tensor
  // The addresses for the results. For allreduce, broadcast and reducescatter, one for
  // each tensor, which may be the address of the input. For allgather and alltoall,
  // empty or one for each tensor. The core allocates the memory of a result if `outs`
  // is empty or the memory of the caller does not have exactly the size of the result.
  ShortVector<void*, 1> outs;
  // The size in bytes of the memory at each address in `outs`. May be empty for
  // operations whose result sizes do not depend on other ranks.
  std::vector<uint64_t> rooms;
  uint64_t stream = 0;   // stream of the submitter, for CUDA tensors
  void* keep = nullptr;  // returned by EndedTasks::Take after the operation
  // The operation fails after waiting this many seconds for other ranks. 0 means no
  // limit, and a negative value means EagerOptions::timeout.
  double timeout = -1;
  // Whether the caller waits for the operation right after Submit. If so, Submit may
  // run rounds and calls itself instead of waking the lane's own thread.
  bool waits = false;
};

// Runs the calls of an eager lane on tensors of a device. Any thread may call Mark,
// Abort, Finish and Close. Only the lane's own thread calls the other functions.
class EagerBackend {
 public:
  virtual ~EagerBackend() = default;
  // Records a point in the submitter's stream, after all work enqueued there so far.
  // Run makes the device wait for that point before it uses the tensors. Fails if this
  // backend cannot run the operation.
  virtual Result<std::shared_ptr<DevicePoint>> Mark(const EagerRequest& request) = 0;
  // Connects the devices of all ranks, unless they are connected already. Every rank
  // must call Open before each Run.
  virtual Status Open() = 0;
  // Allocates memory on the device, and fills it with copies of `pattern` unless
  // `pattern` is empty.
  virtual Result<std::shared_ptr<void>> Allocate(
      uint64_t bytes, std::span<const std::byte> pattern) = 0;
  // Enqueues a call that all ranks have agreed to make. `marks` are the points that
  // Mark has returned for this rank's submissions in the call. `*end` receives the
  // point after which the device no longer uses the tensors. After an error, `*end` is
  // set only if the device may still use the tensors.
  virtual Status Run(const Call& call,
                     std::span<const std::shared_ptr<DevicePoint>> marks,
                     std::shared_ptr<DevicePoint>* end) = 0;
  virtual void Abort(const Status& status) = 0;
  // Waits for the end of the enqueued work, but only for a limited time. Run must not
  // be called after Finish.
  virtual void Finish() = 0;
  // Releases the backend, after the lane's thread has ended or when the lane moves to
  // the next epoch.
  virtual void Close() = 0;
};

// Creates the backend of an eager lane for the communicator of one epoch.
using EagerBackendMaker =
    std::function<std::shared_ptr<EagerBackend>(const std::shared_ptr<Communicator>&)>;

}  // namespace ringjax
