// Inline data: the data of short calls, which ranks exchange together with the
// agreement.
//
// All ranks must map one SharedSegment. Before the ranks agree, each rank writes its
// data into its inline slot, behind the frame of its agreement. After the agreement
// each rank has the data of all ranks and finishes the call alone, so the call takes
// one exchange instead of two. Verbs and UCX call data that travel with their
// descriptor inline, too.
//
//   allreduce, reducescatter   the values of the rank, in the element type of the wire;
//                              each rank reduces the elements that it needs
//   broadcast                  the bytes of the root
//   allgather                  the bytes of the rank
//   alltoall                   a table of the bytes that the rank sends to each rank
//                              and expects of each rank, then its bytes
//
// Without a shared segment, an alltoall begins with an exchange of splits. The table
// replaces that exchange, even if the bytes of some rank do not fit into its slot.
#pragma once

#include <span>

#include "base/short_vector.h"
#include "collective/schedule.h"
#include "engine/call/executor.h"

namespace ringjax {

// The data that each rank contributes to this rank's result, in rank order. In a
// reduction, each entry is a whole vector. In a broadcast, only the entry of the root
// has bytes. In an alltoall, each entry is the part that is meant for this rank.
using Values = ShortVector<std::span<const std::byte>, 4>;

// Returns the size in bytes of the longest inline data among `size` ranks. For an
// alltoall, whose sizes differ between ranks, returns the bytes of the table. The
// result is equal on all ranks.
uint64_t InlineBytes(const Problem& problem, const Arithmetic& a, int size);

// Writes the data of this rank into its inline slot. Must be called before the next
// agreement, in which the peers read the slot.
void PutInline(const Problem& problem, const Arithmetic& a, const Spans& in,
               const Endpoints& endpoints);

// Finds the data of all ranks after the agreement. `*values` points into the inline
// slots and is valid until this rank begins its next call. `*whole` is false, on all
// ranks, if the data of some rank did not fit into its slot; then `*values` is empty.
// Only an alltoall can fail: with kMismatch if a rank sends another size than its peer
// expects (the error names no rank), or with kUnavailable if a table is damaged.
Status ReadInline(const Problem& problem, const Arithmetic& a,
                  const Endpoints& endpoints, Values* values, bool* whole);

// Finds the values of a call in `given`, the data that all ranks sent with a round
// (Piggyback in agreement.h). An alltoall must have equal splits. Returns -1 on
// success, or the first rank whose data have another size than the call requires.
int ReadPiggybacked(const Problem& problem, const Arithmetic& a, int rank,
                    std::span<const std::span<const std::byte>> given, Values* values);

// Computes the result of this rank from `values`. All ranks reduce the same values in
// the same order, so all results have the same bits.
void FinishInline(const Problem& problem, const Arithmetic& a, const Values& values,
                  int rank, const Spans& out);

}  // namespace ringjax
