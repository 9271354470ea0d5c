// The result that each collective promises: which elements must be where at its end.
// Only the verifier uses it, to check schedules.
#pragma once

#include <cstdint>
#include <vector>

#include "base/status.h"
#include "collective/schedule.h"

namespace ringjax::symbolic {

// The promise to one rank: the sizes of its kIn and kOut in elements, and the contents
// of kOut.
struct Promise {
  struct Part {
    uint64_t count;
    int source;         // the rank of the elements; -1 if reduced over all ranks
    uint64_t position;  // offset of the first element in the kIn of the source
  };
  uint64_t in = 0, out = 0;
  std::vector<Part> parts;  // contents of kOut, in order
};

Promise PromiseTo(int rank, const std::vector<Problem>& problems);

// Whether the results are reductions over all ranks, and not copies.
bool Reduces(Collective op);

// Returns kInvalidArgument unless the problems of all ranks belong to one collective.
Status CheckAgreement(const std::vector<Problem>& problems);

}  // namespace ringjax::symbolic
