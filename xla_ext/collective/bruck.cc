// Bruck's allgather: every round doubles the number of blocks that a rank holds. It is
// best for short blocks on many ranks. Any number of ranks and any sizes are possible.
//
//               steps         messages     sent by each rank, n elements on P ranks
//   allgather   ceil(log2 P)  2 per round  (P - 1) / P n
//
// Bruck et al., "Efficient algorithms for all-to-all communications in multiport
// message-passing systems", IEEE TPDS 1997. Ranks receive blocks at the final offsets,
// in two messages if they wrap round the end, so there is no final rotation.
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
