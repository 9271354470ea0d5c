// Error messages about submissions that do not fit together or that some ranks have not
// made. Equal arguments give equal messages on all ranks. The messages name world
// ranks; members[r] is the world rank of rank r of the process set.
#pragma once

#include <string>
#include <vector>

#include "base/status.h"
#include "engine/eager/negotiation.h"

namespace ringjax {

// Compares the submissions of all ranks for one operation, and ignores null entries. If
// two submissions do not fit together, returns kMismatch with the first difference:
// "Mismatched shapes of allreduce 'grad': rank 0 sent f32[17,2], rank 1 sent
// f32[17,3]". Status::rank() is the rank to blame: ranks that sent equal values form a
// group, and the first rank of the second largest group is blamed. Of two groups of
// equal size, the group with the lower first rank counts as the larger.
Status Compare(const SubmissionsByRank& by_rank, const std::vector<int>& members);

// Returns "rank 1 has not submitted allreduce 'x' (f32[4], SUM) for 300 s", followed by
// `waiting.hint` if that is not empty.
std::string MissingText(const Negotiation::Waiting& waiting,
                        const std::vector<int>& members, double seconds);

// Formats `ranks`, which are ranks of the set, as world ranks: "rank 3", "ranks 0-2,
// 5".
std::string RankList(const std::vector<int>& ranks, const std::vector<int>& members);

}  // namespace ringjax
