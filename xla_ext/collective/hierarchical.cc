// Hierarchical algorithms: as few bytes as possible between hosts, the rest through
// memory inside the hosts. They are composed of the other algorithms. The table is for
// n elements on H hosts of L ranks each.
//
//                        steps                          crossing a host's link
//   allreduce, even      2 + 2 (H - 1)                  2 (H - 1) / H n
//   allreduce, uneven    2 ceil(log2 L) + 2 (H - 1)     2 (H - 1) / H n
//   ... by halving       2 log2 H instead of 2 (H - 1), for many hosts and few bytes;
//                        halving.cc says what is added if H is not a power of two
//   allgather, even      1 + (H - 1)                    (H - 1) / H n
//   reducescatter, even  1 + (H - 1)                    (H - 1) / H n
//   alltoall, even       2                              (H - 1) / H n L
//   broadcast            ceil(log2 H) + ceil(log2 L)    ceil(log2 H) n, root's host
//
// Between hosts, a rank of the alltoall has H - 1 messages of L blocks, and not P - L
// messages of one block.
//
// Hosts are *even* if all have the same number of ranks. Then the ranks with index i in
// their hosts form a group, *rail* i, that moves part i of the vector between hosts, so
// that all ranks share this work: Kandalla et al., "Designing multi-leader-based
// allgather algorithms for multi-core clusters", IPDPS 2009. On uneven hosts one leader
// of each host moves the whole vector.
#include <algorithm>
#include <bit>
#include <map>

#include "collective/algorithms.h"
#include "collective/cost.h"

namespace ringjax::collective {
namespace {

using HostRanks = std::vector<std::vector<int>>;

bool Even(const HostRanks& hosts) {
  return std::all_of(hosts.begin(), hosts.end(), [&](const std::vector<int>& ranks) {
    return ranks.size() == hosts[0].size();
  });
}

// The position of a rank: its host, the ranks of that host, and its index among them.
struct Position {
  Position(const HostRanks& hosts, int rank) {
    for (size_t h = 0; h < hosts.size(); ++h) {
      const auto place = std::find(hosts[h].begin(), hosts[h].end(), rank);
      if (place == hosts[h].end()) continue;
      host = static_cast<int>(h);
      local = {hosts[h], static_cast<int>(place - hosts[h].begin())};
    }
  }

  // Returns the ranks whose index on their host is local.index, one on each host. Every
  // host must have a rank with this index.
  Group Rail(const HostRanks& hosts) const {
    Group rail{{}, host};
    for (const std::vector<int>& ranks : hosts)
      rail.ranks.push_back(ranks[static_cast<size_t>(local.index)]);
    return rail;
  }

  int host = 0;
  Group local;
};

// Returns the blocks that belong to `ranks`, in the order of `ranks`.
Blocks BlocksOf(const std::vector<int>& ranks, const Blocks& blocks) {
  std::vector<Range> ranges;
  for (const int r : ranks) ranges.push_back(blocks.At(r));
  return ranges;
}

// Adds a reduce-scatter inside the hosts, a ring allreduce between the hosts, and an
// allgather inside the hosts. The phases inside the hosts work block by block, in the
// descending order in which the ring sends and delivers blocks, so that all phases
// overlap.
void AllreduceOnRails(ScheduleBuilder* builder, const HostRanks& hosts,
                      const Position& position, Range whole) {
  const Group rail = position.Rail(hosts);
  const Blocks parts = Blocks::Even(whole, position.local.size());
  const auto split = [&](int i) { return Blocks::Even(parts.At(i), rail.size()); };
  // The ring sends blocks in the order in which they are reduced here, so the ring need
  // not wait for the whole part.
  for (int s = 1; s <= rail.size(); ++s) {
    std::vector<Range> next;
    for (int i = 0; i < position.local.size(); ++i)
      next.push_back(split(i).At(rail.index - s));
    const Range mine = next[static_cast<size_t>(position.local.index)];
    AddDirectReduceScatter(builder, position.local, next, false, OutAt(mine));
  }
  AddRingReduceScatter(builder, rail, split(position.local.index), InPlace);
  AddRingAllgather(builder, rail, split(position.local.index));
  for (int s = 0; s < rail.size(); ++s) {
    std::vector<Range> arrived;
    for (int i = 0; i < position.local.size(); ++i)
      arrived.push_back(split(i).At(rail.index - s));
    AddDirectAllgather(builder, position.local, arrived);
  }
}

// Each phase waits until the previous phase has finished the whole part, because with
// few bytes overlapping gains nothing.
void HalveOnRails(ScheduleBuilder* builder, const HostRanks& hosts,
                  const Position& position, Range whole) {
  const Blocks parts = Blocks::Even(whole, position.local.size());
  const Range mine = parts.At(position.local.index);
  AddDirectReduceScatter(builder, position.local, parts, false, OutAt(mine));
  AddHalvingAllreduce(builder, position.Rail(hosts), mine);
  AddDirectAllgather(builder, position.local, parts);
}

void HalveByLeaders(ScheduleBuilder* builder, const HostRanks& hosts,
                    const Position& position, Range whole) {
  AddBinomialReduce(builder, position.local, 0, whole, false);
  if (position.local.index == 0)
    AddHalvingAllreduce(builder, position.Rail(hosts), whole);
  AddBinomialBroadcast(builder, position.local, 0, whole);
}

void AllreduceByLeaders(ScheduleBuilder* builder, const HostRanks& hosts,
                        const Position& position, Range whole) {
  const Blocks blocks = Blocks::Even(whole, static_cast<int>(hosts.size()));
  AddBinomialReduce(builder, position.local, 0, whole, false);
  if (position.local.index == 0) {
    const Group leaders = position.Rail(hosts);
    AddRingReduceScatter(builder, leaders, blocks, InPlace);
    AddRingAllgather(builder, leaders, blocks);
  }
  for (int s = 0; s < blocks.size(); ++s)
    AddBinomialBroadcast(builder, position.local, 0, blocks.At(position.host - s));
}

}  // namespace

bool HasHierarchy(const Topology& topology) {
  const size_t hosts = Hosts(topology).size();
  return hosts > 1 && hosts < static_cast<size_t>(topology.size);
}

bool HasEvenHierarchy(const Topology& topology) {
  return HasHierarchy(topology) && Even(Hosts(topology));
}

Schedule HierarchicalAllreduce(const Problem& problem, const Topology& topology) {
  const HostRanks hosts = Hosts(topology);
  if (hosts.size() == 1) return DirectAllreduce(problem, topology);
  const Position position(hosts, topology.rank);
  const Range whole{0, problem.counts[0]};
  ScheduleBuilder builder;
  if (Even(hosts))
    AllreduceOnRails(&builder, hosts, position, whole);
  else
    AllreduceByLeaders(&builder, hosts, position, whole);
  return builder.Take();
}

Schedule BetweenHosts(const Schedule& schedule, const Topology& topology) {
  const auto host = [&](int rank) { return topology.host[static_cast<size_t>(rank)]; };
  Schedule between;
  for (const Step& step : schedule.steps)
    if (step.peer >= 0 && host(step.peer) != host(topology.rank))
      between.steps.push_back(step);
  return between;
}

Schedule HierarchicalHalvingAllreduce(const Problem& problem,
                                      const Topology& topology) {
  const HostRanks hosts = Hosts(topology);
  const Position position(hosts, topology.rank);
  const Range whole{0, problem.counts[0]};
  ScheduleBuilder builder;
  (Even(hosts) ? HalveOnRails : HalveByLeaders)(&builder, hosts, position, whole);
  return builder.Take();
}

// Each rail gathers its blocks first. Then the ranks of each host send each other the
// blocks of their rails.
Schedule HierarchicalAllgather(const Problem& problem, const Topology& topology) {
  const HostRanks hosts = Hosts(topology);
  const Position position(hosts, topology.rank);
  const Group rail = position.Rail(hosts);
  const Blocks blocks = Blocks::Of(problem.counts);
  const Range own = blocks.At(topology.rank);
  ScheduleBuilder builder;
  builder.Move(own, {Region::kIn, 0, own.count});
  AddRingAllgather(&builder, rail, BlocksOf(rail.ranks, blocks));
  for (int s = 0; s < rail.size(); ++s) {
    const int h = Wrap(rail.index - s, rail.size());
    AddDirectAllgather(&builder, position.local,
                       BlocksOf(hosts[static_cast<size_t>(h)], blocks));
  }
  builder.Finish(own);
  return builder.Take();
}

// The reduction inside the hosts is first: each rank reduces the blocks of its rail, in
// the order in which the rail then sends the blocks. No step may write to kIn, so
// partial results are in scratch.
Schedule HierarchicalReducescatter(const Problem& problem, const Topology& topology) {
  const HostRanks hosts = Hosts(topology);
  const Position position(hosts, topology.rank);
  const Group rail = position.Rail(hosts);
  const Blocks blocks = Blocks::Of(problem.counts);
  ScheduleBuilder builder;
  std::map<uint64_t, Slice> sums;  // partial results, by the offset of the block
  uint64_t used = 0;
  for (int s = 1; s <= rail.size(); ++s) {
    const int h = Wrap(rail.index - s, rail.size());
    const Range block = blocks.At(rail.At(h));
    const Slice sum{Region::kScratch, used, block.count};
    used += block.count;
    if (block.count > 0) sums[block.offset] = sum;
    AddDirectReduceScatter(&builder, position.local,
                           BlocksOf(hosts[static_cast<size_t>(h)], blocks), false, sum);
  }
  builder.ReserveScratch(used);
  const int rounds = rail.size() - 1;
  AddRingReduceScatter(&builder, rail, BlocksOf(rail.ranks, blocks),
                       [&](int round, Range block) -> Slice {
                         if (round == rounds - 1 || block.count == 0)
                           return {Region::kOut, 0, block.count};
                         return sums.at(block.offset);
                       });
  return builder.Take();
}

namespace {

bool AreConsecutive(const std::vector<int>& ranks) {
  return ranks.back() - ranks.front() == static_cast<int>(ranks.size()) - 1;
}

}  // namespace

// First the ranks of a host exchange blocks, so that each rank has all blocks of its
// host for its rail. Then the ranks of the rail exchange these blocks. The vector of
// the builder consists of the blocks that this rank sends, by receiver; the blocks that
// it collects, by host and sender; and those that it receives, by host and sender.
Schedule HierarchicalAlltoall(const Problem& problem, const Topology& topology) {
  if (!problem.even) return PairwiseAlltoall(problem, topology);
  const HostRanks hosts = Hosts(topology);
  const Position position(hosts, topology.rank);
  const Group rail = position.Rail(hosts);
  const Group& local = position.local;
  const uint64_t count = problem.counts[0];
  const int size = topology.size, each = local.size();
  const auto at = [&](int first, int n = 1) {
    return Range{static_cast<uint64_t>(first) * count,
                 static_cast<uint64_t>(n) * count};
  };
  const auto slice = [&](Region region, int first, int n = 1) {
    return Slice{region, at(first).offset, at(first, n).count};
  };
  ScheduleBuilder builder;
  for (int s = 1; s <= rail.size(); ++s) {  // the own host is last
    const int host = Wrap(rail.index + s, rail.size());
    const std::vector<int>& there = hosts[static_cast<size_t>(host)];
    const auto place = [&](int i) {  // where the block from the local rank i belongs
      return host == rail.index ? slice(Region::kOut, local.At(i))
                                : slice(Region::kScratch, host * each + Wrap(i, each));
    };
    for (int i = 1; i < each; ++i) {
      const int to = local.index + i, from = local.index - i;
      builder.Send(local.At(to), at(there[static_cast<size_t>(Wrap(to, each))]));
      builder.Recv(local.At(from), at(size + host * each + Wrap(from, each)),
                   place(from));
    }
    if (host == rail.index) {
      builder.Finish(at(topology.rank), place(local.index));
      break;
    }
    builder.Copy(at(rail.At(host)), place(local.index));
    const Range collected = at(size + host * each, each);
    builder.Move(collected, slice(Region::kScratch, host * each, each));
    builder.Send(rail.At(host), collected);
    const int source = Wrap(rail.index - s, rail.size());
    const std::vector<int>& senders = hosts[static_cast<size_t>(source)];
    const Range arriving = at(2 * size + source * each, each);
    const bool in_order = AreConsecutive(senders);
    builder.Recv(rail.At(source), arriving,
                 in_order ? slice(Region::kOut, senders[0], each)
                          : slice(Region::kScratch, size + source * each, each));
    for (int i = 0; i < each && !in_order; ++i)
      builder.Finish(at(2 * size + source * each + i),
                     slice(Region::kOut, senders[static_cast<size_t>(i)]));
  }
  builder.ReserveScratch(2 * at(size).offset);
  return builder.Take();
}

// The leader of the root's host is the root; on other hosts it is the first rank.
Schedule HierarchicalBroadcast(const Problem& problem, const Topology& topology) {
  const HostRanks hosts = Hosts(topology);
  const Position position(hosts, topology.rank), root(hosts, problem.root);
  const Range whole{0, problem.counts[0]};
  Group leaders{{}, position.host};
  for (const std::vector<int>& ranks : hosts) leaders.ranks.push_back(ranks[0]);
  leaders.ranks[static_cast<size_t>(root.host)] = problem.root;
  ScheduleBuilder builder;
  if (leaders.At(position.host) == topology.rank)
    AddBinomialBroadcast(&builder, leaders, root.host, whole);
  const int leader = position.host == root.host ? root.local.index : 0;
  AddBinomialBroadcast(&builder, position.local, leader, whole);
  if (topology.rank == problem.root) builder.Finish(whole);
  return builder.Take();
}

namespace {

// Returns the time of `rounds` trips around the rings between hosts. `bytes` is the sum
// over all rings, which work at the same time.
double BetweenHosts(double rounds, double bytes, int hosts, const CostModel& model) {
  const double hops = rounds * (hosts - 1);
  return hops * (model.remote_latency + model.remote_message +
                 bytes / hosts * model.remote_byte);
}

// Returns the topology of one host with `ranks` ranks.
Topology FullHost(int ranks) {
  return {0, ranks, std::vector<int>(static_cast<size_t>(ranks), 0)};
}

// Returns the topology of one rank on each host.
Topology Leaders(int hosts) {
  Topology leaders{0, hosts, {}};
  for (int h = 0; h < hosts; ++h) leaders.host.push_back(h);
  return leaders;
}

// Returns the time of one trip around the rings, plus that of the phase `inside` the
// hosts.
double OnRails(double (*inside)(uint64_t, const Network&), uint64_t bytes,
               const Network& net) {
  const Traffic traffic(net);
  return inside(bytes, {FullHost(traffic.widest()), net.model}) +
         BetweenHosts(1, static_cast<double>(bytes), traffic.hosts(), net.model);
}

// Returns the time of both phases of an allreduce inside the hosts.
double InsideHosts(uint64_t bytes, const Traffic& traffic, const CostModel& model) {
  const auto cost = traffic.even() ? DirectAllreduceCost : TreeAllreduceCost;
  return cost(bytes, {FullHost(traffic.widest()), model});
}

}  // namespace

double HierarchicalAllreduceCost(uint64_t bytes, const Network& net) {
  const Traffic traffic(net);
  return InsideHosts(bytes, traffic, net.model) +
         BetweenHosts(2, static_cast<double>(bytes), traffic.hosts(), net.model);
}

// The phases do not overlap. On 2 x 4 ranks and links of 1 Gbit/s, this algorithm took
// 0.86 to 1.0 of the time of the hierarchical schedule up to 1 MiB, and 1.09 for 16
// MiB. On faster links, it took 0.7 to 0.85 up to 1 MiB, and 0.9 to 1.0 for 16 MiB.
double RailsAllreduceCost(uint64_t bytes, const Network& net) {
  constexpr uint64_t kMostInTurn = 2 << 20;
  const Traffic traffic(net);
  const double inside =
      SharedAllreduceCost(bytes, {FullHost(traffic.widest()), net.model});
  const double exposed =
      bytes > kMostInTurn ? InsideHosts(bytes, traffic, net.model) : 0;
  return inside + exposed +
         BetweenHosts(2, static_cast<double>(bytes), traffic.hosts(), net.model);
}

double HierarchicalHalvingAllreduceCost(uint64_t bytes, const Network& net) {
  const Traffic traffic(net);
  return InsideHosts(bytes, traffic, net.model) +
         HalvingAllreduceCost(bytes, {Leaders(traffic.hosts()), net.model});
}

double HierarchicalAllgatherCost(uint64_t bytes, const Network& net) {
  return OnRails(DirectAllgatherCost, bytes, net);
}

double HierarchicalReducescatterCost(uint64_t bytes, const Network& net) {
  return OnRails(DirectReducescatterCost, bytes, net);
}

double HierarchicalAlltoallCost(uint64_t bytes, const Network& net) {
  const Traffic traffic(net);
  const int hosts = traffic.hosts(), each = traffic.widest();
  const double block = static_cast<double>(bytes) / net.topology.size;
  const Topology one_host = FullHost(each), leaders = Leaders(hosts);
  Traffic inside({one_host, net.model}), between({leaders, net.model});
  for (int p = 0; p < each; ++p)
    for (int q = 0; q < each; ++q)
      if (p != q) inside.Send(p, q, block * hosts, hosts);
  between.SendAll(block * each * each);
  return inside.Seconds(1) + between.Seconds(1);
}

double HierarchicalBroadcastCost(uint64_t bytes, const Network& net) {
  const Traffic traffic(net);
  return TreeBroadcastCost(bytes, {FullHost(traffic.widest()), net.model}) +
         TreeBroadcastCost(bytes, {Leaders(traffic.hosts()), net.model});
}

}  // namespace ringjax::collective
