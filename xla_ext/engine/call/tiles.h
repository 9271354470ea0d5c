// Long messages through the shared segment, tile by tile.
//
// All ranks must map one SharedSegment. Short messages travel as inline data instead
// (inline_data.h).
//
// An allreduce works as follows. The message is cut into tiles, and each of the P
// ranks owns one part of every tile, about 1/P of it, which it reduces for all ranks. A
// tile passes through three phases on every rank:
//
//   copy in    the parts that the rank does not own: its input -> its own slot
//   reduce     the part that it owns: its input and the same part of every other rank's
//              slot -> its output, and the common result slot
//   copy out   the parts that it does not own: the common result slot -> its output
//
// A reduce-scatter ends after the second phase. So do the collectives that only move
// data: their second phase copies the parts of all ranks from the slots to the output.
// In an allgather or a broadcast, a rank writes its data once, and all peers read them.
// In an alltoall, each peer reads its part.
//
// For an allreduce and a reduce-scatter, these are the transfers of the direct
// algorithm (collective/direct.cc), with one difference: data that P - 1 ranks need are
// written once and not P - 1 times. Each rank writes (P-1)/P n + n/P elements to the
// segment and reads 2 (P-1)/P n. No rank reads another rank's private memory, so this
// works where CMA (transport/cma.h) is forbidden.
//
// Each rank has several slots and reuses them in turn, so ranks may work on different
// tiles at the same time. tiles.cc describes the flow control. Each part is reduced on
// one rank and then copied, so all ranks end with the same bits.
//
// References:
//   Graham and Shipman, "MPI Support for Multi-core Architectures: Optimized Shared
//   Memory Collectives", EuroPVM/MPI 2008. The phases are the "copy-in/copy-out" of
//   Open MPI's coll/sm and coll/xhc.
#pragma once

#include <cstdint>
#include <vector>

#include "collective/schedule.h"
#include "engine/call/executor.h"
#include "engine/call/sum_decoder.h"

namespace ringjax {

enum class Sums : uint8_t { kComplete, kPartial };

// Runs an allreduce, a reduce-scatter, a broadcast, an allgather, or an alltoall with
// problem.even. The buffers of an allreduce or a broadcast may be the same memory. An
// allreduce must have at least one element. Fails with the errors of Execute.
//
// A reduce-scatter of kPartial sums is one step of a larger reduction: the results are
// neither scaled nor rounded to the wire's element type. Other collectives ignore that.
//
// Sets `*fits` to false, on all ranks, if a tile has fewer cache lines than it must
// hold blocks. Then no data have moved, and the caller must use the executor.
Status RunInTiles(const Problem& problem, const Buffers& buffers,
                  const Arithmetic& arithmetic, const Endpoints& endpoints,
                  Waiter* waiter, bool* fits, Sums sums = Sums::kComplete);

// Runs an exchange of exact sums: an allreduce of `count` elements of 8 bytes, whose
// results have 4 bytes. The rank that reduces a part decodes it while it is in a cache,
// and the other ranks copy and check the means. `count` must be at least 1.
Status ExchangeInTiles(uint64_t count, const Buffers& buffers,
                       const Arithmetic& arithmetic, SumDecoder* decoder,
                       const Endpoints& endpoints, Waiter* waiter);

// Returns the parts that `rank` reduces in such an exchange.
std::vector<PartOfSums> PartsInTiles(uint64_t count, const Arithmetic& arithmetic,
                                     const Endpoints& endpoints, int rank);

// -- results that outlive an aborted call --------------------------------------------
//
// If an allreduce uses every slot at most once, all results stay in the segment until
// the next call. A resilient communicator then needs no barrier at the end of the call:
// once every rank has reduced its parts, every rank can complete the call alone, even
// if a peer is lost and the communicator is aborted meanwhile.

// Returns the value that the counter kReduced of every rank will have once all results
// of an allreduce that begins now are in the segment, or 0 if some slot would be used
// twice.
uint64_t RetainedWhenReducedIs(uint64_t count, const Arithmetic& arithmetic,
                               const SharedSegment& segment);

// Repeats the copy-out phase of an allreduce that was aborted after kReduced of every
// rank had reached the value of RetainedWhenReducedIs. Does not wait. The slots still
// hold the results, because a peer overwrites them only in a later call, which cannot
// begin without the agreement of this rank.
void CopyOutRetained(const Buffers& buffers, uint64_t count,
                     const Arithmetic& arithmetic, const Endpoints& endpoints);

}  // namespace ringjax
