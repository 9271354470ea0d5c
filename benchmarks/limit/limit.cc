// The lowest possible cost of collectives between processes of one machine: loops over
// shared memory, or over the memory of another process, that move as few bytes as
// private buffers allow, and plain streams over loopback TCP. This is no library: NaN
// is wrong in bfloat16, and the only error is a rank that does not start. limit.py
// builds and calls this file.

#include <memory>

#include "limit_allreduce.h"
#include "limit_collectives.h"
#include "limit_rank.h"

namespace {

// Returns 0, or -1 if another rank is missing.
template <typename Step>
int Repeat(int calls, Step step) {
  for (int i = 0; i < calls; ++i) {
    if (!step()) return -1;
  }
  return 0;
}

}  // namespace

extern "C" {

// Returns null if a rank is missing, or if there are too many ranks. A waiting rank
// polls `spins` times before it yields.
void* limit_join(const char* name, int rank, int size, int spins) {
  if (size < 1 || size > kMaxRanks || rank < 0 || rank >= size) return nullptr;
  auto self = std::make_unique<Rank>(rank, size, spins);
  return self->Join(name) ? self.release() : nullptr;
}

void limit_leave(void* rank) { delete static_cast<Rank*>(rank); }

// Returns whether ranks may read each other's memory.
int limit_can_read(void* rank) { return static_cast<Rank*>(rank)->can_read() ? 1 : 0; }

// Each of these functions repeats an operation `calls` times. It returns 0, or -1 if
// another rank is missing.
int limit_allreduce(void* rank, const LimitJob* job, int calls) {
  auto* self = static_cast<Rank*>(rank);
  return Repeat(calls, [&] { return Allreduce(self, *job).Run(); });
}

int limit_move(void* rank, const LimitMove* move, int calls) {
  auto* self = static_cast<Rank*>(rank);
  return Repeat(calls, [&] { return Collective(self, *move).Run(); });
}

int limit_transfer(void* rank, size_t bytes, int streams, int calls) {
  auto* self = static_cast<Rank*>(rank);
  return Repeat(calls, [&] {
    return self->rank() > 1 || self->streams()->Transfer(self->rank(), bytes, streams);
  });
}

}  // extern "C"
