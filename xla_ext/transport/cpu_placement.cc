// See cpu_placement.h.
#include "transport/cpu_placement.h"

#include <algorithm>

#include "transport/ring_buffer.h"

namespace ringjax {

void CpuPlacement::Check(int core) {
  if (memory_->layout().ranks < 2 || ++waits_ % kPeriod != 0 || core < 0) return;
  uint32_t& own = memory_->words(index_).core;
  // A word that does not change stays in the caches of the peers.
  const uint32_t known = static_cast<uint32_t>(core) + 1;
  if (LoadShared(own) != known) StoreShared(own, known);
  found_ = HasLowerRank(core) ? found_ + 1 : 0;
  if (found_ < kLooks) return;
  found_ = 0;
  const auto now = Clock::now();
  if (moves_ > 0 && now - moved_ < pause_) return;
  if (!Leave(core)) return;
  const bool again = moves_++ > 0 && now - moved_ < 8 * pause_;
  pause_ = again ? std::min(2 * pause_, kLongest) : kShortest;
  moved_ = now;
}

bool CpuPlacement::HasLowerRank(int core) const {
  for (int rank = 0; rank < index_; ++rank) {
    if (LoadShared(memory_->words(rank).core) == static_cast<uint32_t>(core) + 1)
      return true;
  }
  return false;
}

// Allows this thread only the cores that no rank uses, which moves it at once, and then
// again all cores that it had, which does not move it back. Returns whether it moved:
// there may be no such core, and a sandbox may forbid the calls.
bool CpuPlacement::Leave(int core) const {
  cpu_set_t all, others;
  if (sched_getaffinity(0, sizeof all, &all) != 0) return false;
  others = all;
  CPU_CLR(static_cast<size_t>(core), &others);
  for (int rank = 0; rank < memory_->layout().ranks; ++rank) {
    const uint32_t word = LoadShared(memory_->words(rank).core);
    if (rank != index_ && word > 0 && word <= CPU_SETSIZE) CPU_CLR(word - 1, &others);
  }
  if (CPU_COUNT(&others) == 0 || sched_setaffinity(0, sizeof others, &others) != 0)
    return false;
  return sched_setaffinity(0, sizeof all, &all) == 0;
}

}  // namespace ringjax
