// Ring algorithms: every rank receives from one neighbour and sends to the other, and
// all links work all the time. Rings are best for long vectors on slow networks. Their
// latency grows with the number of ranks.
//
//                 steps      sent by each rank, n elements on P ranks
//   allreduce     2 (P - 1)  2 (P - 1) / P n
//   reducescatter   P - 1      (P - 1) / P n
//   allgather       P - 1      (P - 1) / P n
//   broadcast       P - 1      n; the ring is cut open and becomes a chain
//
// The chain leads from host to host, so that the n elements enter and leave each host
// once. A rank forwards data while they arrive. No algorithm for either half of the
// allreduce can send fewer bytes: Patarasu and Yuan, "Bandwidth optimal all-reduce
// algorithms for clusters of workstations", JPDC 2009.
#include <algorithm>
#include <vector>

#include "collective/algorithms.h"
#include "collective/cost.h"

namespace ringjax::collective {
namespace {

// Returns the time of `rounds` trips around the ring.
double RingCost(double rounds, uint64_t bytes, const Network& net) {
  Traffic traffic(net);
  const int size = net.topology.size;
  const double hops = rounds * (size - 1);
  for (int r = 0; r < size && size > 1; ++r)
    traffic.Send(r, (r + 1) % size, hops / size * static_cast<double>(bytes), hops);
  return traffic.Seconds(hops);
}

}  // namespace

// In round s, rank r sends block r - 1 - s, to which the s ranks before it and r itself
// have contributed, and adds its contribution to block r - 2 - s, which it receives.
// The last block that it receives is its own.
void AddRingReduceScatter(ScheduleBuilder* builder, const Group& group,
                          const Blocks& blocks, const Destination& destination) {
  const int r = group.index, rounds = group.size() - 1;
  for (int s = 0; s < rounds; ++s) {
    const Range block = blocks.At(r - 2 - s);
    builder->Send(group.At(r + 1), blocks.At(r - 1 - s));
    builder->RecvReduce(group.At(r - 1), block, s == rounds - 1, destination(s, block));
  }
}

void AddRingAllgather(ScheduleBuilder* builder, const Group& group,
                      const Blocks& blocks) {
  const int r = group.index;
  for (int s = 0; s < group.size() - 1; ++s) {
    builder->Send(group.At(r + 1), blocks.At(r - s));
    builder->Recv(group.At(r - 1), blocks.At(r - s - 1));
  }
}

Schedule RingAllreduce(const Problem& problem, const Topology& topology) {
  if (topology.size == 1) return Alone(problem.counts[0]);
  const Group world = World(topology);
  const Blocks blocks = Blocks::Even({0, problem.counts[0]}, topology.size);
  ScheduleBuilder builder;
  AddRingReduceScatter(&builder, world, blocks, InPlace);
  AddRingAllgather(&builder, world, blocks);
  return builder.Take();
}

// No step may write to kIn, so partial results are in scratch: in two slots, because
// the rank sends one partial result while it receives the next.
Schedule RingReducescatter(const Problem& problem, const Topology& topology) {
  if (topology.size == 1) return Alone(problem.counts[0]);
  const Blocks blocks = Blocks::Of(problem.counts);
  const uint64_t slot = blocks.Largest();
  const int rounds = topology.size - 1;
  ScheduleBuilder builder;
  builder.ReserveScratch(slot * static_cast<uint64_t>(std::min(rounds - 1, 2)));
  const auto destination = [&](int round, Range block) -> Slice {
    if (round == rounds - 1) return {Region::kOut, 0, block.count};
    return {Region::kScratch, slot * static_cast<uint64_t>(round % 2), block.count};
  };
  AddRingReduceScatter(&builder, World(topology), blocks, destination);
  return builder.Take();
}

Schedule RingAllgather(const Problem& problem, const Topology& topology) {
  const Blocks blocks = Blocks::Of(problem.counts);
  const Range own = blocks.At(topology.rank);
  ScheduleBuilder builder;
  builder.Move(own, {Region::kIn, 0, own.count});
  AddRingAllgather(&builder, World(topology), blocks);
  builder.Finish(own);
  return builder.Take();
}

Schedule ChainBroadcast(const Problem& problem, const Topology& topology) {
  const Range whole{0, problem.counts[0]};
  auto hosts = Hosts(topology);
  const auto has_root = [&](const std::vector<int>& ranks) {
    return std::find(ranks.begin(), ranks.end(), problem.root) != ranks.end();
  };
  const auto first = std::find_if(hosts.begin(), hosts.end(), has_root);
  std::rotate(hosts.begin(), first, hosts.end());
  std::rotate(hosts[0].begin(),
              std::find(hosts[0].begin(), hosts[0].end(), problem.root),
              hosts[0].end());
  std::vector<int> chain;
  for (const auto& ranks : hosts) chain.insert(chain.end(), ranks.begin(), ranks.end());
  const auto here = std::find(chain.begin(), chain.end(), topology.rank);
  ScheduleBuilder builder;
  if (here != chain.begin()) builder.Recv(*(here - 1), whole);
  if (here + 1 != chain.end()) builder.Send(*(here + 1), whole);
  if (topology.rank == problem.root) builder.Finish(whole);
  return builder.Take();
}

// Computes the cost for root 0, so that the choice does not depend on the root.
double ChainBroadcastCost(uint64_t bytes, const Network& net) {
  Traffic traffic(net);
  int before = -1;
  for (const auto& ranks : Hosts(net.topology))
    for (const int rank : ranks) {
      if (before >= 0) traffic.Send(before, rank, static_cast<double>(bytes));
      before = rank;
    }
  return traffic.Seconds(net.topology.size - 1);
}

double RingAllreduceCost(uint64_t bytes, const Network& net) {
  return RingCost(2, bytes, net);
}

double RingReducescatterCost(uint64_t bytes, const Network& net) {
  return RingCost(1, bytes, net);
}

double RingAllgatherCost(uint64_t bytes, const Network& net) {
  return RingCost(1, bytes, net);
}

}  // namespace ringjax::collective
