// Texts about submissions that do not fit together, or that some ranks have not made.
// Equal arguments give equal texts on all ranks. The texts contain world ranks;
// members[r] is the world rank of rank r of the set.
#pragma once

#include <string>
#include <vector>

#include "base/status.h"
#include "engine/eager/negotiation.h"

namespace ringjax {

// Compares the submissions of all ranks for one operation, and ignores null entries. If
// two do not fit together, returns kMismatch with the first difference: "Mismatched
// shapes of allreduce 'grad': rank 0 sent f32[17,2], rank 1 sent f32[17,3]".
// Status::rank() is the culprit. To find it, ranks that sent equal values form a group,
// and the culprit is the first rank of the second largest group. Of two groups of equal
// size, the group with the lower first rank counts as the larger.
Status Compare(const std::vector<SubmissionPtr>& by_rank,
               const std::vector<int>& members);

// Returns "rank 1 has not submitted allreduce 'x' (f32[4], SUM) for 300 s", followed by
// `waiting.hint` if that is not empty.
std::string MissingText(const Negotiation::Waiting& waiting,
                        const std::vector<int>& members, double seconds);

// Returns "rank 3" or "ranks 0-2, 5" in world ranks. `ranks` are ranks in the set.
std::string RankList(const std::vector<int>& ranks, const std::vector<int>& members);

}  // namespace ringjax
