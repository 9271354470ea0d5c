// The buckets of the overlap windows on a device: for each bucket the CUDA events that
// order its Start and its Done, and the memory in which Start leaves the results.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "device/device_resources.h"
#include "engine/call/descriptor.h"

namespace ringjax {

// Owned by a CudaCommunicator. The caller holds turn_mutex_ of the CudaCommunicator and
// has made the device's context current. To start a bucket, the caller calls Fork,
// enqueues the allreduce, and calls Started.
class CudaOverlap {
 public:
  // A bucket of an overlap window. `pending` means that Start has run and Done has not,
  // `on_stream` that Start used the stream of the caller.
  struct Site {
    cuda::Event ready = nullptr, done = nullptr;
    bool pending = false, on_stream = false;
    std::vector<const void*> results;  // addresses at which Start left the results
  };

  // Without `comm_stream`, Start uses the stream of the caller.
  CudaOverlap(const DeviceResources& device, bool comm_stream);

  // Changes `call` to work in place, and makes the communication stream wait for
  // `stream`. `site` and `first` are as in CudaCommunicator::Start.
  Result<Site*> Fork(Call* call, int64_t site, bool first, cuda::Stream stream);
  // Records Site::done after the work of the call, and marks the bucket as pending.
  Status Started(Site* here);

  // Returns the bucket and clears its `pending`; returns null if it was not pending.
  Site* Collect(int64_t site);
  // Makes `stream` wait for the results of Start, and copies each result whose `out` in
  // `call` is not the memory in which Start left it.
  Status Join(const Site& here, const Call& call, cuda::Stream stream);

  // Forgets all buckets. Destroys the buckets' events if the device is `idle`,
  // otherwise leaks the events.
  void Release(bool idle);

 private:
  Status CheckNoneStale(bool first, int64_t site);
  Result<Site*> SiteOf(int64_t site);

  const cuda::Driver& driver_;
  const DeviceResources& device_;
  const bool comm_stream_;
  std::map<int64_t, Site> sites_;
};

}  // namespace ringjax
