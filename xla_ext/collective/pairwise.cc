// Pairwise alltoall with uneven counts: in round i, rank r sends to r + i and receives
// from r - i, so that not all ranks send to the same rank at the same time.
//
//              steps  messages  sent by rank r
//   alltoall     1     P - 1    the elements that r has for other ranks, each once
//
// No message depends on another one; rounds are only the order of the steps of a rank.
// Thakur, Rabenseifner and Gropp, IJHPCA 2005, section 4.4.
#include "collective/algorithms.h"
#include "collective/cost.h"

namespace ringjax::collective {

// The vector of the builder is the data that this rank sends, followed by the data that
// it receives.
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

double PairwiseAlltoallCost(uint64_t bytes, const Network& net) {
  Traffic traffic(net);
  if (net.topology.size == 1) return traffic.Seconds(0);
  traffic.SendAll(static_cast<double>(bytes) / net.topology.size);
  return traffic.Seconds(1);
}

}  // namespace ringjax::collective
