// Parting together from something that ranks share beside their links.
//
// Links of a communicator may be cut at any time. What NCCL gives back when it is
// aborted, other ranks of the host may still use, so that all of them must come to it
// before. Whoever is about to do so says that it *lets go*; this knows who has not. The
// heartbeat carries it: it lives when the communicator has ended.
#pragma once

#include <cstdint>
#include <vector>

namespace ringjax {

class Farewell {
 public:
  virtual ~Farewell() = default;
  // Tells all peers that this rank lets go of a communicator of that id and epoch.
  virtual void LetGo(int communicator, uint32_t epoch) = 0;
  // Those of `ranks`, of the world, that are here and have not let go; nobody once this
  // has stopped.
  virtual std::vector<int> Holding(int communicator, uint32_t epoch,
                                   const std::vector<int>& ranks) const = 0;
};

}  // namespace ringjax
