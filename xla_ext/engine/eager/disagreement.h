// Sentences about submissions that do not fit together or that somebody has not made.
// They are alike on all ranks and name world ranks. Nothing is decided here.
#pragma once

#include <string>
#include <vector>

#include "base/status.h"
#include "engine/eager/negotiation.h"

namespace ringjax {

// OkStatus if all of them fit together; else kMismatch with the first difference and
// the world rank that stands alone (the lower part, or the later one of two equal
// parts): "Mismatched shapes of allreduce 'grad': rank 0 sent f32[17,2], rank 1 sent
// f32[17,3]". Null ones take no part.
Status Compare(const std::vector<SubmissionPtr>& by_rank,
               const std::vector<int>& members);

// "rank 1 has not submitted allreduce 'x' (f32[4], SUM) for 300 s", and the hint.
std::string MissingText(const Negotiation::Waiting& waiting,
                        const std::vector<int>& members, double seconds);

// "rank 3" or "ranks 0-2, 5" in world ranks. `ranks` in the set.
std::string RankList(const std::vector<int>& ranks, const std::vector<int>& members);

}  // namespace ringjax
