// Bruck's algorithms, for short blocks on many ranks: ceil(log2 P) rounds, in each of
// which a rank sends to one peer and receives from another, at a distance of a power of
// two. Any number of ranks is possible.
//
//               steps         messages     sent by each rank, n elements on P ranks
//   allgather   ceil(log2 P)  2 per round  (P - 1) / P n
//   alltoall    ceil(log2 P)  1 per round  about log2(P) / 2 n
//
// In the allgather, every round doubles the number of blocks that a rank holds. Blocks
// may have any sizes. Ranks receive blocks at the final offsets, in two messages if
// they wrap round the end, so there is no final rotation.
//
// In the alltoall, round k moves each block whose distance from its sender to its
// receiver has the bit 2^k by that distance, to a rank that forwards it in later
// rounds. All blocks of all ranks must have the same size, because a rank does not know
// the sizes of the blocks that it forwards. Other alltoalls are sent pairwise.
//
// Bruck et al., "Efficient algorithms for all-to-all communications in multiport
// message-passing systems", IEEE TPDS 1997.
#include <algorithm>

#include "collective/algorithms.h"
#include "collective/cost.h"

namespace ringjax::collective {
namespace {

// Visits the blocks first, first + 1, ..., first + count - 1, modulo the number of
// blocks, as two ranges. The second range is empty if no block wraps.
template <typename Visit>
void ForRuns(const Blocks& blocks, int first, int count, const Visit& visit) {
  const int lo = Wrap(first, blocks.size());
  const int head = std::min(count, blocks.size() - lo);
  visit(blocks.Between(lo, lo + head));
  visit(blocks.Between(0, count - head));
}

// Returns the distances below `size` that have the bit `reach`: the blocks of a
// message.
std::vector<size_t> Moving(int reach, int size) {
  std::vector<size_t> moving;
  for (int i = reach; i < size; ++i)
    if ((i & reach) != 0) moving.push_back(static_cast<size_t>(i));
  return moving;
}

}  // namespace

// Before each round a rank holds `have` blocks: its own and those of the next ranks.
Schedule BruckAllgather(const Problem& problem, const Topology& topology) {
  const int size = topology.size, rank = topology.rank;
  const Blocks blocks = Blocks::Of(problem.counts);
  const Range own = blocks.At(rank);
  ScheduleBuilder builder;
  builder.Move(own, {Region::kIn, 0, own.count});
  builder.Finish(own);  // first: the sends below read `own` and other blocks from kOut
  for (int have = 1; have < size; have *= 2) {
    const int count = std::min(have, size - have);
    const int to = Wrap(rank - have, size), from = Wrap(rank + have, size);
    ForRuns(blocks, rank, count, [&](Range run) { builder.Send(to, run); });
    ForRuns(blocks, from, count, [&](Range run) { builder.Recv(from, run); });
  }
  return builder.Take();
}

// Block i has to travel over the distance i: first it is the block for rank + i, and at
// the end it is the block from rank - i. The builder's vector consists of all blocks,
// followed by the message that this rank is about to send.
Schedule BruckAlltoall(const Problem& problem, const Topology& topology) {
  if (!problem.even) return PairwiseAlltoall(problem, topology);
  const int size = topology.size, rank = topology.rank;
  const uint64_t count = problem.counts[0];
  const auto blocks = [&](size_t first, size_t n) {
    return Range{first * count, n * count};
  };
  const auto slice = [&](Region region, size_t first, size_t n) {
    return Slice{region, first * count, n * count};
  };
  const auto of_rank = [&](int r) { return static_cast<size_t>(Wrap(r, size)); };
  ScheduleBuilder builder;
  for (int i = 0; i < size; ++i)
    builder.Move(blocks(of_rank(i), 1), slice(Region::kIn, of_rank(rank + i), 1));
  size_t used = 0;  // blocks in the scratch memory
  for (int reach = 1; reach < size; reach *= 2) {
    const std::vector<size_t> moving = Moving(reach, size);
    const size_t n = moving.size();
    for (size_t k = 0; k < n; ++k)
      builder.Copy(blocks(moving[k], 1), slice(Region::kScratch, used + k, 1));
    const Range message = blocks(static_cast<size_t>(size), n);
    builder.Move(message, slice(Region::kScratch, used, n));
    builder.Send(Wrap(rank + reach, size), message);
    used += n;
    builder.Recv(Wrap(rank - reach, size), message, slice(Region::kScratch, used, n));
    for (size_t k = 0; k < n; ++k)
      builder.Move(blocks(moving[k], 1), slice(Region::kScratch, used + k, 1));
    used += n;
  }
  builder.ReserveScratch(used * count);
  for (int i = 0; i < size; ++i)
    builder.Finish(blocks(of_rank(i), 1), slice(Region::kOut, of_rank(rank - i), 1));
  return builder.Take();
}

double BruckAlltoallCost(uint64_t bytes, const Network& net) {
  Traffic traffic(net);
  const int size = net.topology.size;
  const double block = static_cast<double>(bytes) / size;
  for (int reach = 1; reach < size; reach *= 2) {
    const auto moving = static_cast<double>(Moving(reach, size).size());
    for (int r = 0; r < size; ++r)
      traffic.Send(r, Wrap(r + reach, size), block * moving);
  }
  return traffic.Seconds(CeilLog2(size), Flow::kByRounds);
}

double BruckAllgatherCost(uint64_t bytes, const Network& net) {
  Traffic traffic(net);
  const int size = net.topology.size;
  const double block = static_cast<double>(bytes) / size;
  for (int have = 1; have < size; have *= 2) {
    const int count = std::min(have, size - have);
    for (int r = 0; r < size; ++r)
      traffic.Send(r, Wrap(r - have, size), block * count, 2);
  }
  return traffic.Seconds(CeilLog2(size), Flow::kByRounds);
}

}  // namespace ringjax::collective
