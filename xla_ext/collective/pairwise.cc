// Pairwise alltoall with uneven counts: in round i, rank r sends to r + i and receives
// from r - i, so that no rank is everybody's target at the same time.
//
//              steps  messages  sent by rank r
//   alltoall     1     P - 1    what r has for others, each element once
//
// No message depends on another; rounds are only the order of a rank's steps. Thakur,
// Rabenseifner and Gropp, IJHPCA 2005, section 4.4.
#include "collective/algorithms.h"
#include "collective/cost.h"

namespace ringjax::collective {

// The builder's vector is what this rank sends, followed by what it receives.
Schedule PairwiseAlltoall(const Problem& problem, const Topology& topology) {
  const int size = topology.size, rank = topology.rank;
  const auto middle = problem.counts.begin() + size;
  const Blocks send = Blocks::Of({problem.counts.begin(), middle});
  const Blocks recv = Blocks::Of({middle, problem.counts.end()});
  ScheduleBuilder builder;
  for (int i = 1; i < size; ++i) {
    const Range in = recv.At(rank - i);
    builder.Send(Wrap(rank + i, size), send.At(rank + i));
    builder.Recv(Wrap(rank - i, size), {send.whole().count + in.offset, in.count},
                 OutAt(in));
  }
  builder.Finish(send.At(rank), OutAt(recv.At(rank)));
  return builder.Take();
}

double PairwiseAlltoallCost(uint64_t bytes, const Topology& topology,
                            const CostModel& model) {
  Traffic traffic(topology, model);
  if (topology.size == 1) return traffic.Seconds(0);
  traffic.SendAll(static_cast<double>(bytes) / topology.size);
  return traffic.Seconds(1);
}

}  // namespace ringjax::collective
