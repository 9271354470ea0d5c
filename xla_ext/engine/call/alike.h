// Checks by hashes whether all ranks hold the same bytes: one hash of everything first,
// then a hash of each tensor, then every rank's hash of the first tensor that differs.
// The caller supplies the exchange between ranks (MaxOverRanks).
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace ringjax {

// Returns whether the ranks compare their parameters at training step `step`, counted
// from 0. They do at multiples of `every`, and at 1, 10 and 100, because most mistakes
// show in the first steps. If `every` is 0, the ranks never compare.
bool ComparesAt(uint64_t step, uint64_t every);

// Hashes bytes as fast as memory can be read. Does not resist constructed collisions.
uint64_t HashOfBytes(const void* data, uint64_t size);

// Replaces each number by its maximum over all ranks. The length of the vector does not
// depend on the number of ranks, so the exchange can run again if a rank is lost.
using MaxOverRanks = std::function<Status(std::vector<uint64_t>*)>;

// Returns a text about the first tensor that differs between ranks, which is the same
// on all ranks, or an empty text if no tensor differs. Needs one exchange if no tensor
// differs, otherwise three. hashes[i] is the hash of tensor i, `names` has the names of
// the tensors, joined by newlines, and members[r] is the world rank of rank r. Fails if
// `max_over_ranks` fails.
Result<std::string> Difference(std::span<const uint64_t> hashes, std::string_view names,
                               const std::vector<int>& members, int rank,
                               const MaxOverRanks& max_over_ranks);

}  // namespace ringjax
