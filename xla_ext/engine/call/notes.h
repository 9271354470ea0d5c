// Notes: short calls of ranks on a board. What a rank gives goes with its frame of the
// agreement, so that one exchange is all.
//
//   allreduce, reducescatter   its values, as they travel; who needs sums adds them up
//   broadcast                  the root's bytes
//   allgather                  its bytes
//   alltoall                   a table of how many bytes it sends to and expects of
//   each
//                              rank, then its bytes
//
// The table makes the exchange of splits needless that an alltoall begins with
// elsewhere, also if the bytes of some rank do not fit.
#pragma once

#include <span>
#include <vector>

#include "collective/schedule.h"
#include "engine/call/executor.h"

namespace ringjax {

// By rank, what each has for this one: whole vectors of a sum, nothing of most ranks in
// a broadcast, a part in an alltoall.
using Values = std::vector<std::span<const std::byte>>;

// Whether what each rank gives fits its note, as far as all ranks know: of an alltoall,
// whether the table does.
bool FitsNote(const Problem& problem, const Arithmetic& a, const Board& board);

// Before the ranks agree: this rank's into the note of the coming turn.
void PutNote(const Problem& problem, const Arithmetic& a, const Spans& in,
             const Lane& lane);

// After they did: the notes of all ranks, which are those of one call. kMismatch: what
// ranks send is not what their peers expect; no ranks are named. kUnavailable: damaged.
// `*whole`: whether all have given their bytes; alike on all ranks.
Status ReadNotes(const Problem& problem, const Arithmetic& a, const Lane& lane,
                 Values* values, bool* whole);

// What comes with messages (Beside, in agreement.h) as values of such a call; whose
// parts are equal, if it is an alltoall. -1, or the first rank that gave other bytes
// than it has.
int SortOut(const Problem& problem, const Arithmetic& a, int rank,
            std::span<const std::span<const std::byte>> given, Values* values);

// This rank's result. Ranks add up the same numbers in the same order, so they end with
// the same bits.
void Finish(const Problem& problem, const Arithmetic& a, const Values& values, int rank,
            const Spans& out);

}  // namespace ringjax
