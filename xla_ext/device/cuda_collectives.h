// The collectives of a device communicator, as kernels and NCCL operations.
//
// An allreduce or a broadcast is fused (fusion.h). An allgather or a reducescatter has
// one NCCL operation per tensor, or one per tensor and rank if the ranks have different
// numbers of rows. An alltoall has a send and a receive per tensor and peer. All NCCL
// operations of a call are one group, so NCCL may run them together.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "device/device_resources.h"
#include "device/fusion.h"
#include "device/nccl_comm.h"

namespace ringjax {

// Totals over all calls of one collective, such as allreduce. `seconds` is the time
// that the host spent in the calls.
struct CudaStats {
  uint64_t calls = 0, bytes = 0, packed_bytes = 0, launches = 0, nccl_ops = 0;
  double seconds = 0;
};

// Enqueues the collectives of the CudaCommunicator that owns this object. The caller
// holds turn_mutex_ of the CudaCommunicator and has made the device's context current.
class CudaCollectives {
 public:
  // Allocates device memory for the fused buffer. The memory may be reused after the
  // stream has executed all work of the call.
  using Workspace = std::function<Result<cuda::Pointer>(size_t bytes)>;

  // The arguments and the statistics of one call.
  struct Work {
    const Call& call;
    const FusionPlan& plan;
    cuda::Stream stream;
    const Workspace& workspace;
    CudaStats used;
    // Whether the group of NCCL operations has failed; NCCL may still launch the group.
    bool unsettled = false;
  };

  CudaCollectives(std::shared_ptr<Communicator> control, const DeviceResources& device,
                  NcclComm& comm, Fusion mode);

  Status Enqueue(Work* work);

 private:
  Status Fused(Work* work);
  // Fills patches_ with the tensors of `segment`. `address` is &Tensor::in or ::out.
  void Gather(const Call& call, const Segment& segment, void* Tensor::* address);
  // Unpacks the segments, and calls Seal for the results that were not packed.
  Status Unfuse(Work* work, const cuda::Kernels::Target& target);
  bool Alone() const;
  Status CopyThrough(Work* work);
  Status Allgather(Work* work);
  Status Reducescatter(Work* work);
  struct Scattered;
  Status Scatter(Work* work, const Scattered& tensor, DType dtype);
  Status Alltoall(Work* work);
  Status Barrier(Work* work);
  Status Group(Work* work, const std::function<Status()>& body);  // NcclComm::Group
  // A piece of a result. If the poison word is set, Seal writes NaN to its beginning.
  struct Sealed {
    size_t tensor;
    uint64_t offset, bytes;
  };
  Status Seal(Work* work, const std::vector<Sealed>& pieces);
  Status SealBlocks(Work* work, size_t first, size_t stride);
  Status Issued(Work* work, nccl::Outcome outcome, std::string_view what);
  cuda::Kernels::Target TargetOf(Work* work, cuda::Pointer fused) const;

  int rank() const { return control_->rank(); }
  int size() const { return control_->size(); }

  const std::shared_ptr<Communicator> control_;
  const cuda::Driver& driver_;
  const nccl::Nccl& nccl_;
  const DeviceResources& device_;
  NcclComm& comm_;
  const Fusion mode_;
  std::vector<cuda::Patch> patches_;  // kept between calls for its capacity
};

}  // namespace ringjax
