// Direct algorithms: every rank exchanges data with all others at the same time. A rank
// sends as few bytes as in a ring, in the fewest steps possible. Direct algorithms are
// best on one host, where many messages at once cost little.
//
//                 steps  messages  sent by each rank, n elements on P ranks
//   allreduce       2    2 (P - 1)  2 (P - 1) / P n
//   reducescatter   1      P - 1      (P - 1) / P n
//   allgather       1      P - 1      (P - 1) / P n
//   broadcast       2      P - 1      n from the root, (P - 2) / (P - 1) n from others
//
// In the broadcast the root scatters the vector over the other ranks, which exchange
// their blocks: van de Geijn's scatter-allgather, Barnett et al., "Interprocessor
// collective communication library", SHPCC 1994, except that the root receives nothing.
#include "collective/algorithms.h"
#include "collective/cost.h"

namespace ringjax::collective {
namespace {

double DirectCost(double rounds, uint64_t bytes, const Network& net) {
  Traffic traffic(net);
  if (net.topology.size == 1) return traffic.Seconds(0);
  for (int i = 0; i < static_cast<int>(rounds); ++i)
    traffic.SendAll(static_cast<double>(bytes) / net.topology.size);
  return traffic.Seconds(rounds);
}

}  // namespace

// Each rank first receives from its predecessor, then from the predecessor's
// predecessor, and so on, so that not all ranks wait for data of one rank first.
void AddDirectReduceScatter(ScheduleBuilder* builder, const Group& group,
                            const Blocks& blocks, bool last, Slice own) {
  const int r = group.index, peers = group.size() - 1;
  for (int i = 1; i <= peers; ++i) {
    builder->Send(group.At(r + i), blocks.At(r + i));
    builder->RecvReduce(group.At(r - i), blocks.At(r), last && i == peers, own);
  }
}

void AddDirectAllgather(ScheduleBuilder* builder, const Group& group,
                        const Blocks& blocks) {
  const int r = group.index;
  for (int i = 1; i < group.size(); ++i) {
    builder->Send(group.At(r + i), blocks.At(r));
    builder->Recv(group.At(r - i), blocks.At(r - i));
  }
}

Schedule DirectAllreduce(const Problem& problem, const Topology& topology) {
  if (topology.size == 1) return Alone(problem.counts[0]);
  const Group world = World(topology);
  const Blocks blocks = Blocks::Even({0, problem.counts[0]}, topology.size);
  ScheduleBuilder builder;
  AddDirectReduceScatter(&builder, world, blocks, true, OutAt(blocks.At(world.index)));
  AddDirectAllgather(&builder, world, blocks);
  return builder.Take();
}

Schedule DirectReducescatter(const Problem& problem, const Topology& topology) {
  if (topology.size == 1) return Alone(problem.counts[0]);
  const Blocks blocks = Blocks::Of(problem.counts);
  const Slice own{Region::kOut, 0, blocks.At(topology.rank).count};
  ScheduleBuilder builder;
  AddDirectReduceScatter(&builder, World(topology), blocks, true, own);
  return builder.Take();
}

Schedule DirectAllgather(const Problem& problem, const Topology& topology) {
  const Blocks blocks = Blocks::Of(problem.counts);
  const Range own = blocks.At(topology.rank);
  ScheduleBuilder builder;
  builder.Move(own, {Region::kIn, 0, own.count});
  AddDirectAllgather(&builder, World(topology), blocks);
  builder.Finish(own);
  return builder.Take();
}

Schedule DirectBroadcast(const Problem& problem, const Topology& topology) {
  const int root = problem.root, others = topology.size - 1;
  const Range whole{0, problem.counts[0]};
  ScheduleBuilder builder;
  if (topology.rank == root) {
    const Blocks blocks = Blocks::Even(whole, others > 0 ? others : 1);
    for (int i = 0; i < others; ++i)
      builder.Send(Wrap(root + 1 + i, topology.size), blocks.At(i));
    builder.Finish(whole);
    return builder.Take();
  }
  Group group{{}, Wrap(topology.rank - root - 1, topology.size)};
  for (int i = 0; i < others; ++i)
    group.ranks.push_back(Wrap(root + 1 + i, topology.size));
  const Blocks blocks = Blocks::Even(whole, others);
  builder.Recv(root, blocks.At(group.index));
  AddDirectAllgather(&builder, group, blocks);
  return builder.Take();
}

double DirectAllreduceCost(uint64_t bytes, const Network& net) {
  return DirectCost(2, bytes, net);
}

double DirectReducescatterCost(uint64_t bytes, const Network& net) {
  return DirectCost(1, bytes, net);
}

double DirectAllgatherCost(uint64_t bytes, const Network& net) {
  return DirectCost(1, bytes, net);
}

// Computes the cost for root 0, so that the choice does not depend on the root.
double DirectBroadcastCost(uint64_t bytes, const Network& net) {
  Traffic traffic(net);
  if (net.topology.size == 1) return traffic.Seconds(0);
  const double block = static_cast<double>(bytes) / (net.topology.size - 1);
  for (int r = 1; r < net.topology.size; ++r) traffic.Send(0, r, block);
  traffic.SendAll(block, 1);
  return traffic.Seconds(2);
}

}  // namespace ringjax::collective
