// The buckets of the overlap windows on a device: for each bucket the events between
// its Start and its Done, and the memory in which Start leaves the results.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "device/device_resources.h"
#include "engine/call/descriptor.h"

namespace ringjax {

// Owned by a CudaCommunicator. The caller holds turn_mutex_ of the CudaCommunicator,
// and the context of the device is current. The call is enqueued between Fork and
// Started.
class CudaOverlap {
 public:
  // A bucket of an overlap window. `pending`: Start has run and Done has not.
  // `on_stream`: Start used the stream of the caller.
  struct Site {
    cuda::Event ready = nullptr, done = nullptr;
    bool pending = false, on_stream = false;
    std::vector<const void*> results;  // addresses at which Start left the results
  };

  // Without `comm_stream`, Start uses the stream of the caller.
  CudaOverlap(const DeviceResources& device, bool comm_stream);

  // Makes `call` work in place, and the communication stream wait for `stream`. `site`
  // and `first` are those of CudaCommunicator::Start.
  Result<Site*> Fork(Call* call, int64_t site, bool first, cuda::Stream stream);
  // Records Site::done behind the work of the call, and marks the bucket as pending.
  Status Started(Site* here);

  // Returns the bucket, which is not pending any more; null if it was not pending.
  Site* Collect(int64_t site);
  // Makes `stream` wait for the results of Start, and copies the results that `call`
  // wants in other memory.
  Status Join(const Site& here, const Call& call, cuda::Stream stream);

  // Forgets all buckets. Destroys their events if the device is `idle`, otherwise leaks
  // them.
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
