// Whether all ranks hold the same bytes, by hashes: of everything first, then of each
// tensor, then who has which. How numbers get from rank to rank is the caller's matter.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace ringjax {

// Whether the ranks compare at a step, numbered from 0: every so many steps, and at 1,
// 10 and 100, since what makes ranks differ mostly does so in the first steps.
bool ComparesAt(uint64_t step, uint64_t every);

// As fast as memory is read; no defence against anybody who looks for collisions.
uint64_t HashOfBytes(const void* data, uint64_t size);

// Replaces each number by the greatest that a rank has in its place. The length does
// not depend on the number of ranks, so that the loss of one does not matter.
using Greatest = std::function<Status(std::vector<uint64_t>*)>;

// What differs, in words, the same on all ranks; nothing if they are alike. One
// exchange then, three if not. `names`: of the tensors, joined by newlines;
// `members[r]`: the world rank of rank r.
Result<std::string> Difference(std::span<const uint64_t> hashes, std::string_view names,
                               const std::vector<int>& members, int rank,
                               const Greatest& greatest);

}  // namespace ringjax
