// Moving bytes between the ranks of one host with one copy: whoever wants them reads
// them from the memory of whoever has them (process_vm_readv).
//
// Broadcast, allgather and alltoall, whose bytes nobody has to change. A rank posts on
// the board where its bytes lie and waits until all have read. Nobody writes into
// another rank's memory: what a rank has given back to its program is safe, also if the
// others hear of a failure later. And who gives a call up, and its memory back, shows
// that first: what others still read there counts for nothing. After Vienne et al. and
// what MPI libraries call CMA: Goglin and Moreaud, "KNEM: a generic and scalable
// kernel-assisted intra-node MPI communication framework", 2013.
#pragma once

#include "collective/schedule.h"
#include "engine/call/executor.h"

namespace ringjax {

// Whether what ranks post about so many pieces of memory fits the board. The number
// must be alike on all ranks.
bool FitsReading(uint64_t pieces, const Board& board);

// Runs `problem`, whose counts are bytes. `*could`: false if some rank may not read
// another's memory, which all ranks find out together; results are of no use then, and
// the call can be run another way. Errors as Execute's.
Status MoveByReading(const Problem& problem, const Memory& memory, const Lane& lane,
                     Waiter* waiter, bool* could);

}  // namespace ringjax
