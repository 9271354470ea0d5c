// Checks by hashes whether all ranks hold equal tensors. Compares one hash of all
// tensors first; if it differs, then a hash of each tensor, and at last every rank's
// hash of the first tensor that differs. The caller supplies the exchange
// (MaxOverRanks).
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
// from 0: at multiples of `every`, and at steps 1, 10 and 100, because most mistakes
// show in the first steps. Always returns false if `every` is 0.
bool ComparesAt(uint64_t step, uint64_t every);

// Hashes bytes as fast as memory can be read. An attacker can construct collisions.
uint64_t HashOfBytes(const void* data, uint64_t size);

// Replaces each element of the vector by its maximum over all ranks. The length of the
// vector does not depend on the number of ranks, so the exchange can run again if a
// rank is lost.
using MaxOverRanks = std::function<Status(std::vector<uint64_t>*)>;

// Returns an error message about the first tensor that differs between ranks, or "" if
// no tensor differs. The message is equal on all ranks. Makes one exchange if no tensor
// differs, otherwise three. hashes[i] is the hash of tensor i, `names` has the names of
// the tensors, joined by newlines, and members[r] is the world rank of rank r. Fails if
// `max_over_ranks` fails.
Result<std::string> Difference(std::span<const uint64_t> hashes, std::string_view names,
                               const std::vector<int>& members, int rank,
                               const MaxOverRanks& max_over_ranks);

}  // namespace ringjax
