// TeardownBarrier: a barrier before ranks free memory that NCCL shares between ranks.
//
// A rank that aborts NCCL frees memory that kernels of other ranks of the host may
// still use. So each rank first announces that it is ready to abort, and waits, for a
// limited time, until the other live ranks have announced that they are ready. The
// heartbeat carries the announcements, because the links of the communicator may be
// broken by then. Thread-safe.
#pragma once

#include <cstdint>
#include <vector>

namespace ringjax {

class TeardownBarrier {
 public:
  virtual ~TeardownBarrier() = default;
  // Announces to all peers that this rank is ready to tear down the communicator with
  // this id and epoch.
  virtual void AnnounceTeardown(int communicator, uint32_t epoch) = 0;
  // Returns the members of `ranks`, world ranks, that are alive and have not announced
  // that they are ready. Empty once the heartbeat has stopped.
  virtual std::vector<int> NotReady(int communicator, uint32_t epoch,
                                    const std::vector<int>& ranks) const = 0;
};

}  // namespace ringjax
