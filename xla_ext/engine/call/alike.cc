// Hashes tensors, finds the first tensor that differs, and names the ranks that differ.
// See alike.h.
#include "engine/call/alike.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <map>

#include "engine/call/descriptor.h"
#include "engine/call/hash.h"

namespace ringjax {
namespace {

constexpr size_t kLanes = 8;     // hashes whose multiplications run in parallel
constexpr size_t kAhead = 1536;  // distance of the prefetch, in bytes
constexpr size_t kRanks = 1024;  // ranks compared; their hashes, 8 KiB, travel inline
constexpr size_t kMaxNamed = 8;  // ranks named in a text

std::string Ranks(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < std::min(ranks.size(), kMaxNamed); ++i)
    text += (i > 0 ? ", " : "") + std::to_string(ranks[i]);
  if (ranks.size() > kMaxNamed)
    text += " and " + std::to_string(ranks.size() - kMaxNamed) + " more";
  return text;
}

// Names the ranks whose hash is not the most frequent hash. If several hashes are
// equally frequent, the hash of the lowest rank counts as the most frequent one.
// Ignores ranks with hash 0, which were lost during the comparison or have joined.
std::string WhoDiffers(const std::vector<uint64_t>& hashes,
                       const std::vector<int>& members) {
  const size_t known = std::min(members.size(), hashes.size());
  std::map<uint64_t, size_t> votes;
  for (size_t r = 0; r < known; ++r) ++votes[hashes[r]];
  votes[0] = 0;
  size_t right = 0;
  for (size_t r = 0; r < known; ++r)
    if (votes[hashes[r]] > votes[hashes[right]]) right = r;
  std::vector<int> others;
  for (size_t r = 0; r < known; ++r)
    if (hashes[r] != 0 && hashes[r] != hashes[right]) others.push_back(members[r]);
  if (others.empty()) return "some rank is not that of the others";
  return Ranks(others) + " is not that of rank " + std::to_string(members[right]);
}

}  // namespace

bool ComparesAt(uint64_t step, uint64_t every) {
  return every > 0 && (step % every == 0 || step == 1 || step == 10 || step == 100);
}

uint64_t HashOfBytes(const void* data, uint64_t size) {
  std::array<Hash, kLanes> lanes;
  const auto* at = static_cast<const std::byte*>(data);
  constexpr size_t kStride = kLanes * sizeof(uint64_t);
  uint64_t left = size;
  for (; left >= kStride; left -= kStride, at += kStride) {
    __builtin_prefetch(at + kAhead);  // never faults, even beyond the end
    std::array<uint64_t, kLanes> words;
    std::memcpy(words.data(), at, kStride);
    for (size_t i = 0; i < kLanes; ++i) lanes[i].Add(words[i]);
  }
  Hash all;
  all.Add(std::string_view(reinterpret_cast<const char*>(at), left));
  all.Add(size);
  for (const Hash& lane : lanes) all.Add(lane.value());
  return all.value();
}

Result<std::string> Difference(std::span<const uint64_t> hashes, std::string_view names,
                               const std::vector<int>& members, int rank,
                               const MaxOverRanks& max_over_ranks) {
  Hash all;
  for (uint64_t hash : hashes) all.Add(hash);
  // The maximum of ~x is ~(minimum of x), so one exchange finds the minimum and the
  // maximum. If the two are equal, all ranks have the same x.
  std::vector<uint64_t> ends = {all.value(), ~all.value()};
  RJ_TRY(max_over_ranks(&ends));
  if (ends[0] == ~ends[1]) return std::string();
  ends.clear();
  for (uint64_t hash : hashes) ends.insert(ends.end(), {hash, ~hash});
  RJ_TRY(max_over_ranks(&ends));
  size_t first = hashes.size(), count = 0;
  for (size_t i = hashes.size(); i-- > 0;)
    if (ends[2 * i] != ~ends[2 * i + 1]) first = i, ++count;
  std::vector<uint64_t> table(kRanks);
  if (first < hashes.size() && static_cast<size_t>(rank) < kRanks)
    table[static_cast<size_t>(rank)] = hashes[first];
  RJ_TRY(max_over_ranks(&table));
  if (count == 0) return std::string();  // the rank that differed was lost meanwhile
  return "'" + std::string(Line(names, first)) + "' of " + WhoDiffers(table, members) +
         (count == 1 ? ""
                     : ", the first of " + std::to_string(count) + " that differ") +
         "; begin with broadcast_parameters (broadcast_variables), give optimizers "
         "what "
         "all ranks have alike (value=ringjax.allreduce(loss), not the loss of a "
         "rank), "
         "and let no rank change parameters, reduced gradients or optimizer state "
         "alone "
         "(RINGJAX_CHECK_PARAMETERS=0: no such check)";
}

}  // namespace ringjax
