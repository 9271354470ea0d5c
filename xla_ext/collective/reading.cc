// Ranks of one host that read each other's memory (engine/call/reading.cc): every byte
// is copied once, by whoever wants it, from where it lies.
//
// The schedules say who sends what to whom, and nothing is passed on. Nobody runs them
// message by message, but where the kernel does not allow such reads.
//
//               copied by each rank, n bytes in all on P ranks
//   broadcast     n, but for the root
//   allgather     n
//   alltoall      what it receives
#include "collective/algorithms.h"
#include "collective/cost.h"

namespace ringjax::collective {
namespace {

// Posting, finding out that all have read, and entering the kernel: in latencies.
constexpr double kFixed = 4;
// For each byte that a rank has in the end, of what it costs over a link; there half of
// the work is the sender's. Measured with 2 and 4 ranks on 2 cores.
constexpr double kOfLinks = 0.25;

double ReadingCost(double bytes, const Topology& topology, const CostModel& model) {
  Traffic traffic(topology, model);
  if (topology.size == 1) return traffic.Seconds(0);
  return kFixed * model.local_latency + kOfLinks * bytes * model.local_byte;
}

}  // namespace

bool CanRead(const Topology& topology) { return topology.reads; }

Schedule ReadingBroadcast(const Problem& problem, const Topology& topology) {
  const Range whole{0, problem.counts[0]};
  ScheduleBuilder builder;
  if (topology.rank != problem.root) {
    builder.Recv(problem.root, whole);
    return builder.Take();
  }
  for (int i = 1; i < topology.size; ++i)
    builder.Send(Wrap(problem.root + i, topology.size), whole);
  builder.Finish(whole);
  return builder.Take();
}

Schedule ReadingAllgather(const Problem& problem, const Topology& topology) {
  return DirectAllgather(problem, topology);
}

Schedule ReadingAlltoall(const Problem& problem, const Topology& topology) {
  return PairwiseAlltoall(problem, topology);
}

double ReadingBroadcastCost(uint64_t bytes, const Topology& topology,
                            const CostModel& model) {
  return ReadingCost(static_cast<double>(bytes), topology, model);
}

double ReadingAllgatherCost(uint64_t bytes, const Topology& topology,
                            const CostModel& model) {
  return ReadingCost(static_cast<double>(bytes), topology, model);
}

double ReadingAlltoallCost(uint64_t bytes, const Topology& topology,
                           const CostModel& model) {
  return ReadingCost(static_cast<double>(bytes), topology, model);
}

}  // namespace ringjax::collective
