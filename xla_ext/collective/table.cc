// The table of algorithms, with one row for each, and the choice of the cheapest one.
//
// A new algorithm is its own file, a line in algorithms.h, and a row here. kBarrier has
// no rows, because the agreement of a call is already a barrier.
#include "collective/table.h"

#include <array>
#include <utility>

#include "collective/algorithms.h"

namespace ringjax {
namespace {

using namespace collective;  // NOLINT: the table lists this namespace

bool Always(const Topology&) { return true; }
bool HasSharedSegment(const Topology& topology) {
  return topology.segment && OnOneHost(topology.host);
}
bool HasSegmentOnEachHost(const Topology& topology) {
  return topology.segment && HasEvenHierarchy(topology);
}
bool HasSeveralHosts(const Topology& topology) { return !OnOneHost(topology.host); }
// With more ranks on several hosts, P - 1 streams would enter each host, and each rank
// would need links to all others.
constexpr int kMostDirect = 32;
bool HasFewRanks(const Topology& topology) {
  return topology.size <= kMostDirect || OnOneHost(topology.host);
}

constexpr auto kAllreduce = Collective::kAllreduce;
constexpr auto kAllgather = Collective::kAllgather;
constexpr auto kBroadcast = Collective::kBroadcast;
constexpr auto kReducescatter = Collective::kReducescatter;
constexpr auto kAlltoall = Collective::kAlltoall;

constexpr std::string_view kHosts = "several ranks on several hosts";
constexpr std::string_view kSeveralHosts = "several hosts";
constexpr std::string_view kSharedMemory = "memory that all ranks share";
constexpr std::string_view kHostMemory =
    "several hosts with equally many ranks, which share memory";
constexpr std::string_view kFewRanks = "one host or at most 32 ranks";

#define RJ_ROW(op, name, generator, applies, needs) \
  Algorithm { op, name, generator, applies, needs, generator##Cost }

// Among equally cheap algorithms, the first one is chosen.
constexpr std::array kTable = {
    Algorithm{kAllreduce, kShared, DirectAllreduce, HasSharedSegment, kSharedMemory,
              SharedAllreduceCost},
    RJ_ROW(kAllreduce, "direct", DirectAllreduce, HasFewRanks, kFewRanks),
    RJ_ROW(kAllreduce, "ring", RingAllreduce, Always, ""),
    RJ_ROW(kAllreduce, "halving", HalvingAllreduce, Always, ""),
    RJ_ROW(kAllreduce, "tree", TreeAllreduce, Always, ""),
    RJ_ROW(kAllreduce, "double_tree", DoubleTreeAllreduce, Always, ""),
    RJ_ROW(kAllreduce, "hierarchical", HierarchicalAllreduce, HasHierarchy, kHosts),
    RJ_ROW(kAllreduce, "hierarchical_halving", HierarchicalHalvingAllreduce,
           HasHierarchy, kHosts),
    Algorithm{kAllreduce, kHierarchicalShared, HierarchicalAllreduce,
              HasSegmentOnEachHost, kHostMemory, RailsAllreduceCost},
    Algorithm{kAllgather, kShared, DirectAllgather, HasSharedSegment, kSharedMemory,
              SharedAllgatherCost},
    RJ_ROW(kAllgather, "direct", DirectAllgather, HasFewRanks, kFewRanks),
    RJ_ROW(kAllgather, "ring", RingAllgather, Always, ""),
    RJ_ROW(kAllgather, "bruck", BruckAllgather, Always, ""),
    RJ_ROW(kAllgather, "hierarchical", HierarchicalAllgather, HasEvenHierarchy, kHosts),
    Algorithm{kBroadcast, kShared, DirectBroadcast, HasSharedSegment, kSharedMemory,
              SharedBroadcastCost},
    RJ_ROW(kBroadcast, "tree", TreeBroadcast, Always, ""),
    RJ_ROW(kBroadcast, "direct", DirectBroadcast, HasFewRanks, kFewRanks),
    RJ_ROW(kBroadcast, "chain", ChainBroadcast, Always, ""),
    RJ_ROW(kBroadcast, "hierarchical", HierarchicalBroadcast, HasHierarchy, kHosts),
    Algorithm{kReducescatter, kShared, DirectReducescatter, HasSharedSegment,
              kSharedMemory, SharedReducescatterCost},
    RJ_ROW(kReducescatter, "direct", DirectReducescatter, HasFewRanks, kFewRanks),
    RJ_ROW(kReducescatter, "ring", RingReducescatter, Always, ""),
    RJ_ROW(kReducescatter, "halving", HalvingReducescatter, Always, ""),
    RJ_ROW(kReducescatter, "hierarchical", HierarchicalReducescatter, HasEvenHierarchy,
           kHosts),
    Algorithm{kAlltoall, kShared, PairwiseAlltoall, HasSharedSegment, kSharedMemory,
              SharedAlltoallCost},
    RJ_ROW(kAlltoall, kUneven, PairwiseAlltoall, Always, ""),
    RJ_ROW(kAlltoall, "bruck", BruckAlltoall, HasSeveralHosts, kSeveralHosts),
    RJ_ROW(kAlltoall, "hierarchical", HierarchicalAlltoall, HasEvenHierarchy, kHosts),
};
#undef RJ_ROW

std::string Applying(Collective op, const Topology& topology) {
  std::string names;
  for (const Algorithm& row : kTable) {
    if (row.op != op || !row.applies(topology)) continue;
    names += (names.empty() ? "" : ", ") + std::string(row.name);
  }
  return names.empty() ? "none" : names;
}

}  // namespace

std::span<const Algorithm> Algorithms() { return kTable; }

const Algorithm* Find(Collective op, std::string_view name) {
  for (const Algorithm& row : kTable) {
    if (row.op == op && row.name == name) return &row;
  }
  return nullptr;
}

Result<const Algorithm*> Choose(Collective op, std::string_view name, uint64_t bytes,
                                const Topology& topology, const CostModel& model) {
  const Algorithm* best = nullptr;
  double least = 0;
  for (const Algorithm& row : kTable) {
    if (row.op != op || !row.applies(topology)) continue;
    if (!name.empty() && row.name != name) continue;
    const double seconds = name.empty() ? row.cost(bytes, {topology, model}) : 0;
    if (best != nullptr && seconds >= least) continue;
    best = &row;
    least = seconds;
  }
  if (best != nullptr) return best;
  std::string text(Name(op));
  text +=
      name.empty() ? std::string(": no algorithm") : " by '" + std::string(name) + "'";
  if (!name.empty()) {
    const Algorithm* known = Find(op, name);
    text += known ? ": needs " + std::string(known->needs) : ": no such algorithm";
  }
  text += "; for these " + std::to_string(topology.size) +
          " ranks: " + Applying(op, topology);
  return Status(Code::kInvalidArgument, std::move(text));
}

Status CheckProblem(const Problem& problem, int size) {
  size_t counts = static_cast<size_t>(size);
  if (problem.op == kAllreduce || problem.op == kBroadcast) counts = 1;
  if (problem.op == kAlltoall) counts *= 2;
  if (problem.op == Collective::kBarrier) counts = 0;
  const std::string op(Name(problem.op));
  if (problem.counts.size() != counts)
    return {Code::kInvalidArgument, op + ": " + std::to_string(problem.counts.size()) +
                                        " counts, expected " + std::to_string(counts)};
  if (problem.root < 0 || problem.root >= size)
    return {Code::kInvalidArgument, op + ": root " + std::to_string(problem.root) +
                                        " is not one of " + std::to_string(size) +
                                        " ranks"};
  uint64_t sum = 0;
  for (const uint64_t count : problem.counts) {
    if (__builtin_add_overflow(sum, count, &sum))
      return {Code::kInvalidArgument, op + ": the counts add up to 2^64 or more"};
  }
  const auto differs = [&](uint64_t count) { return count != problem.counts[0]; };
  if (problem.even &&
      std::any_of(problem.counts.begin(), problem.counts.end(), differs))
    return {Code::kInvalidArgument, op + ": the counts are not even"};
  return {};
}

}  // namespace ringjax
