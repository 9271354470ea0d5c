// Sums through memory that all ranks of one host map (engine/call/tiles.cc).
//
// The schedules are the direct ones, and say who adds up what and who needs the sum. On
// a board nobody runs them message by message: what one sends to P - 1 peers is written
// once.
//
//                   steps  written by each rank, n elements on P ranks
//   allreduce         2    (P - 1) / P n + n / P
//   reducescatter     1    (P - 1) / P n
#include "collective/algorithms.h"
#include "collective/cost.h"

namespace ringjax::collective {

constexpr double kOfLinks = 0.4;

bool HasBoard(const Topology& topology) { return topology.board; }

Schedule SharedAllreduce(const Problem& problem, const Topology& topology) {
  return DirectAllreduce(problem, topology);
}

Schedule SharedReducescatter(const Problem& problem, const Topology& topology) {
  return DirectReducescatter(problem, topology);
}

double SharedAllreduceCost(uint64_t bytes, const Topology& topology,
                           const CostModel& model) {
  Traffic traffic(topology, model);
  if (topology.size == 1) return traffic.Seconds(0);
  // Up to 1.5 times as fast as the best of the others, in what was measured, and never
  // slower: each byte is written once, and two waits are all.
  return model.local_latency + kOfLinks * static_cast<double>(bytes) * model.local_byte;
}

// The first half of that.
double SharedReducescatterCost(uint64_t bytes, const Topology& topology,
                               const CostModel& model) {
  return SharedAllreduceCost(bytes, topology, model) / 2;
}

}  // namespace ringjax::collective
