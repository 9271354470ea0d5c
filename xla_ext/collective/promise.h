// What each collective promises: which elements must be where in the end. The verifier
// holds schedules against this; nothing else knows it.
#pragma once

#include <cstdint>
#include <vector>

#include "base/status.h"
#include "collective/schedule.h"

namespace ringjax::symbolic {

// To one rank: the sizes of its kIn and kOut, and what kOut must hold.
struct Promise {
  struct Part {
    uint64_t count;
    int source;  // -1: all ranks, reduced
    uint64_t position;
  };
  uint64_t in = 0, out = 0;
  std::vector<Part> parts;  // kOut, in order
};

Promise PromiseTo(int rank, const std::vector<Problem>& problems);

// Whether kOut holds sums of all ranks rather than copies.
bool Reduces(Collective op);

// Do all ranks ask for the same?
Status CheckAgreement(const std::vector<Problem>& problems);

}  // namespace ringjax::symbolic
