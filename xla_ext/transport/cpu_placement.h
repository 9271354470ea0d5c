// Moves a waiting thread away from the core on which a rank runs that it waits for.
//
// Linux can keep two ranks on one core for seconds although another core is idle: each
// of them yields or sleeps whenever it waits for the other, so the core never looks
// overloaded to the scheduler. Every exchange then takes two switches between processes
// (17 instead of 4 us for an allreduce of 4 KiB, 43 instead of 13 us for 64 KiB). Other
// libraries bind each rank to a core, which would take the other cores from the threads
// of XLA and of the program. So a rank here changes its core only if it finds a peer
// there, and stays free to run on all its cores.
#pragma once

#include <sched.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <utility>

#include "transport/host_memory.h"

namespace ringjax {

// The placement of one rank. One thread at a time uses it.
class CpuPlacement {
 public:
  CpuPlacement(std::shared_ptr<HostMemory> memory, int index)
      : memory_(std::move(memory)), index_(index) {}

  // Is called in a wait that has become long. Publishes the core of this thread, and
  // moves this thread if a rank with a lower index has been on this core in several
  // waits. Only one of two ranks moves, so that they do not meet again on another core.
  void Check(int core = sched_getcpu());

  uint64_t moves() const { return moves_; }

 private:
  using Clock = std::chrono::steady_clock;

  static constexpr int kPeriod = 16;  // long waits from one look to the next
  static constexpr int kLooks = 2;    // successive looks that must find a peer
  // Time between two moves. If moves do not help, because other programs use the other
  // cores, the time doubles from kShortest up to kLongest.
  static constexpr Clock::duration kShortest = std::chrono::milliseconds(1),
                                   kLongest = std::chrono::seconds(1);

  bool HasLowerRank(int core) const;
  bool Leave(int core) const;

  const std::shared_ptr<HostMemory> memory_;
  const int index_;
  int waits_ = 0, found_ = 0;
  uint64_t moves_ = 0;
  Clock::duration pause_ = kShortest;
  Clock::time_point moved_;
};

}  // namespace ringjax
