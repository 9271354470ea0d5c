// Collectives through a shared segment (engine/call/tiles.cc).
//
// The schedules are those of other algorithms: for a reduction they say which rank
// reduces which elements, and which ranks need the result. But no messages are sent: a
// rank writes data for P - 1 peers to the shared segment once. The executor runs a
// schedule of this file only if the tiles of a reduce-scatter or an alltoall do not
// fit.
//
//                   steps  written by each rank, n elements on P ranks
//   allreduce         2    (P - 1) / P n + n / P
//   reducescatter     1    (P - 1) / P n
//   allgather         1    n / P
//   broadcast         1    n by the root, 0 by others
//   alltoall          1    (P - 1) / P n
#include "collective/algorithms.h"
#include "collective/cost.h"

namespace ringjax::collective {

namespace {

constexpr double kLinkTimeShare = 0.4;  // time for a byte, relative to a link's

// Collectives that only move data: each byte is written once and read by all ranks that
// need it. On two cores and with more than two ranks, they took 0.3 to 1.0 of the time
// of the best other algorithm, and the most with long messages of an alltoall. Two
// ranks take as long in both ways up to 1 MiB. A longer message of one rank for one
// other is best copied once, by CMA, and so is any broadcast, in which only one rank
// writes.
double MoveCost(uint64_t bytes, uint64_t most_of_two, const Network& net) {
  const bool twice = net.topology.size == 2 && bytes > most_of_two;
  return net.model.local_latency + (twice ? 2 : kLinkTimeShare) *
                                       static_cast<double>(bytes) *
                                       net.model.local_byte;
}

}  // namespace

double SharedAllreduceCost(uint64_t bytes, const Network& net) {
  Traffic traffic(net);
  if (net.topology.size == 1) return traffic.Seconds(0);
  // In measurements, this algorithm was up to 1.5 times as fast as the best other
  // algorithm, and never slower: each byte is written once, and a rank waits only
  // twice.
  return net.model.local_latency +
         kLinkTimeShare * static_cast<double>(bytes) * net.model.local_byte;
}

// A reduce-scatter is the first half of an allreduce.
double SharedReducescatterCost(uint64_t bytes, const Network& net) {
  return SharedAllreduceCost(bytes, net) / 2;
}

double SharedAllgatherCost(uint64_t bytes, const Network& net) {
  return MoveCost(bytes, 1 << 20, net);
}

double SharedAlltoallCost(uint64_t bytes, const Network& net) {
  return MoveCost(bytes, 1 << 20, net);
}

double SharedBroadcastCost(uint64_t bytes, const Network& net) {
  return MoveCost(bytes, 0, net);
}

}  // namespace ringjax::collective
