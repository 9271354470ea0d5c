// CUDA tensors in the eager lane: what the lane has decided, enqueued on NCCL.
//
// A submission marks its stream. The communication stream waits for the marks of all
// submissions of a call, does the work and makes a mark of its own, which streams that
// want the results wait for. The host never waits for the device.
//
// NCCL is joined at the first decision about CUDA tensors, on the lane's thread and by
// all ranks: each prepares what it can by itself and says how it fares, over the lane's
// own communicator; then they connect and tell each other again. A failure until then
// fails these submissions on all ranks and nothing else. The lane compares every call
// before it is run, so no auditor is needed here.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "device/cuda_communicator.h"
#include "device/milestone.h"
#include "engine/eager/lane.h"

namespace ringjax {

struct EagerCudaOptions {
  CudaOptions cuda;  // its device is that of the first tensors
  // The device of a rank that joins before it has any tensors; -1: it has none.
  int fallback_device = -1;
  std::vector<std::string> nccl;  // paths to try; "" is the loader's own search
};

class EagerCuda : public EagerBackend {
 public:
  // `host` is the lane's communicator.
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

  int device() const;  // -1 until it is known
  // Whether NCCL joins the ranks, so that results may be on their way on the device.
  bool joined() const { return open_.load(std::memory_order_acquire); }
  // As CudaCommunicator::Confirm; ok before NCCL has joined the ranks.
  Status Confirm() const;
  std::map<std::string, CudaStats> stats() const;

 private:
  class Spot;
  struct Block;
  struct Hello;

  Status Suits(const Submission& what) const;
  Result<int> DeviceOf(const EagerRequest& request) const;
  Result<std::shared_ptr<cuda::Ground>> GroundOf(int device);
  Status Prepare(Hello* hello);
  Status Judge(const std::vector<std::string>& said, nccl::UniqueId* id) const;
  Status Connect(const nccl::UniqueId& id);
  Result<std::shared_ptr<Spot>> NextEnd();
  std::shared_ptr<CudaCommunicator> communicator() const;
  std::shared_ptr<cuda::Ground> ground() const;

  const EagerCudaOptions options_;
  const std::shared_ptr<Communicator> host_;

  std::atomic<bool> open_{false};
  // Of the lane's thread.
  Status failed_;               // for good
  std::shared_ptr<Spot> next_;  // where the call ends that memory is made for

  mutable std::mutex mutex_;  // guards the rest
  std::shared_ptr<cuda::Ground> ground_;
  std::shared_ptr<CudaCommunicator> communicator_;
  bool closed_ = false;
};

}  // namespace ringjax
