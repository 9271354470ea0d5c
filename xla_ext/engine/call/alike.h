// Checks by hashes whether all ranks hold the same bytes: one hash of everything first,
// then a hash of each tensor, then every rank's hash of the first tensor that differs.
// The caller supplies the exchange between ranks (Greatest).
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace ringjax {

// Whether the ranks compare at training step `step`, counted from 0: at multiples of
// `every`, and at 1, 10 and 100, because most mistakes have effects in the first steps.
// If `every` is 0, the ranks never compare.
bool ComparesAt(uint64_t step, uint64_t every);

// Hashes bytes as fast as memory is read. Does not resist constructed collisions.
uint64_t HashOfBytes(const void* data, uint64_t size);

// Replaces each number by the maximum over all ranks. The vector has the same length
// for any number of ranks, so the exchange can run again if a rank is lost.
using Greatest = std::function<Status(std::vector<uint64_t>*)>;

// Returns a text about the difference between ranks, which is the same on all ranks, or
// an empty text if there is no difference. Needs three exchanges, or one if all ranks
// are alike. `hashes`: one for each tensor; `names`: the names of the tensors, joined
// by newlines; `members[r]`: the world rank of rank r. Fails if `greatest` fails.
Result<std::string> Difference(std::span<const uint64_t> hashes, std::string_view names,
                               const std::vector<int>& members, int rank,
                               const Greatest& greatest);

}  // namespace ringjax
