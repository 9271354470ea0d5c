// Texts about submissions that do not fit together, or that some ranks have not made.
// For the same arguments the text is the same on all ranks. Ranks in it are world
// ranks. members[r] is the world rank of rank r of the set.
#pragma once

#include <string>
#include <vector>

#include "base/status.h"
#include "engine/eager/negotiation.h"

namespace ringjax {

// Compares the submissions of all ranks for one operation; null entries do not take
// part. If two do not fit, returns kMismatch with the first difference: "Mismatched
// shapes of allreduce 'grad': rank 0 sent f32[17,2], rank 1 sent f32[17,3]".
// Status::rank() is the first rank of the second largest group of ranks that sent the
// same; of equal groups, the one with the lower first rank counts as the larger.
Status Compare(const std::vector<SubmissionPtr>& by_rank,
               const std::vector<int>& members);

// Returns "rank 1 has not submitted allreduce 'x' (f32[4], SUM) for 300 s", and the
// hint of `waiting` if there is one.
std::string MissingText(const Negotiation::Waiting& waiting,
                        const std::vector<int>& members, double seconds);

// Returns "rank 3" or "ranks 0-2, 5" in world ranks. `ranks` are ranks in the set.
std::string RankList(const std::vector<int>& ranks, const std::vector<int>& members);

}  // namespace ringjax
