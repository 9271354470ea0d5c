// CUDA tensors in the eager lane: with NCCL, runs the calls that the ranks negotiated.
//
// A submission records a device event on the stream of its caller (Mark). The
// communication stream waits for the events of all submissions of a call, does the work
// and records an event of its own. Streams that use the results wait for that event.
// The host never waits for the device.
//
// The ranks connect NCCL at the first decision about CUDA tensors, on the thread of the
// lane: each rank prepares its own device and sends the outcome to all ranks over the
// communicator of the lane; then the ranks connect and exchange the outcome again. A
// failure up to this point fails these submissions on all ranks, and nothing else. The
// lane compares every call before it runs the call, so there is no consistency checker.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "device/cuda_communicator.h"
#include "device/device_event.h"
#include "engine/eager/backend.h"

namespace ringjax {

struct EagerCudaOptions {
  CudaOptions cuda;  // `device` is ignored: the first tensors decide
  // The device of a rank that joins before it has any tensors; -1 for no device.
  int fallback_device = -1;
  std::vector<std::string> nccl;  // paths to try; "" is the loader's own search
};

// The CUDA backend of a lane in one epoch. EagerBackend says which thread may call
// what.
class EagerCuda : public EagerBackend {
 public:
  // `host` is the host communicator of the lane.
  EagerCuda(EagerCudaOptions options, std::shared_ptr<Communicator> host);
  ~EagerCuda() override;

  Result<std::shared_ptr<DevicePoint>> Mark(const EagerRequest& request) override;
  Status Open() override;
  Result<std::shared_ptr<void>> Allocate(uint64_t bytes,
                                         std::span<const std::byte> pattern) override;
  Status Run(const Call& call, std::span<const std::shared_ptr<DevicePoint>> marks,
             std::shared_ptr<DevicePoint>* end) override;
  void Abort(const Status& status) override;
  void Finish() override;
  void Close() override;

  int device() const;  // CUDA ordinal; -1 until the first tensors or Open
  // Returns whether NCCL has connected the ranks, so that the device may compute
  // results.
  bool joined() const { return open_.load(std::memory_order_acquire); }
  // Like CudaCommunicator::Confirm. Returns ok before NCCL has connected the ranks.
  Status Confirm() const;
  std::map<std::string, CudaStats> stats() const;

 private:
  class StreamPoint;
  struct Block;
  struct Hello;

  Status CheckOperation(const Submission& what) const;
  Result<int> DeviceOf(const EagerRequest& request) const;
  Result<std::shared_ptr<cuda::PrimaryContext>> ContextOf(int device);
  Status Prepare(Hello* hello);
  Status CheckPeers(const std::vector<std::string>& messages, nccl::UniqueId* id) const;
  Status Connect(const nccl::UniqueId& id);
  Result<std::shared_ptr<StreamPoint>> EndOfNextCall();
  std::shared_ptr<CudaCommunicator> communicator() const;
  std::shared_ptr<cuda::PrimaryContext> context() const;

  const EagerCudaOptions options_;
  const std::shared_ptr<Communicator> host_;

  std::atomic<bool> open_{false};
  // Used by the thread of the lane, and by Close. `failed_` is the outcome of Connect,
  // which is not tried again. `next_` is the end of the next call; memory that Allocate
  // returns for that call refers to it (Block::end).
  Status failed_;
  std::shared_ptr<StreamPoint> next_;

  mutable std::mutex mutex_;  // guards the rest
  std::shared_ptr<cuda::PrimaryContext> primary_context_;
  std::shared_ptr<CudaCommunicator> communicator_;
  bool closed_ = false;
};

}  // namespace ringjax
