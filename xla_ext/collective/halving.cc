// Recursive halving and doubling: ranks at distance 1, 2, 4, ... exchange data in
// pairs, and each exchange halves the range that a rank continues to reduce. An
// allgather then makes the same exchanges in reverse order. Few steps and few bytes
// make halving best for middle sizes. Any number of ranks is possible: let p be the
// largest power of two up to that number. Then each rank in excess of p first sends its
// vector to a neighbour, and receives the result at the end.
//
//                 steps                sent by each rank, n elements
//   allreduce     2 log2 p [+ 2]       2 (p - 1) / p n [+ n]
//   reducescatter   log2 p [+ 2]       about (p - 1) / p n [+ one block, or n]
//
//   [...]: if the number of ranks is not a power of two
//
// Rabenseifner, "Optimization of collective reduction operations", ICCS 2004; Thakur,
// Rabenseifner and Gropp, "Optimization of collective communication operations in
// MPICH", IJHPCA 2005. Each element is finished on one rank and then copied: with plain
// recursive doubling, ranks could end with different roundings.
#include <bit>
#include <vector>

#include "collective/algorithms.h"
#include "collective/cost.h"

namespace ringjax::collective {
namespace {

// Chooses `power` ranks, where `power` is the largest power of two up to `size`. The
// first ranks form `pairs` pairs (0, 1), (2, 3), ...: the even rank of a pair leaves,
// and the odd rank represents both. Every rank after the pairs represents itself. The
// ranks that represent some rank are the *members*, numbered 0 .. power - 1.
struct Fold {
  explicit Fold(int size)
      : power(static_cast<int>(std::bit_floor(static_cast<unsigned>(size)))),
        pairs(size - power) {}

  bool Leaves(int rank) const { return rank < 2 * pairs && rank % 2 == 0; }
  bool RepresentsPair(int rank) const { return rank < 2 * pairs && rank % 2 == 1; }
  int Number(int rank) const { return rank < 2 * pairs ? rank / 2 : rank - pairs; }
  int Rank(int number) const {
    return number < pairs ? 2 * number + 1 : number + pairs;
  }
  // Returns the lowest rank that the member with index `number` represents.
  int FirstRank(int number) const { return number < pairs ? 2 * number : Rank(number); }

  int power, pairs;
};

// One exchange between two members that both hold the blocks [keep_lo, keep_hi) and
// [give_lo, give_hi): this member keeps the former and sends the latter to `peer`.
struct Exchange {
  int peer;
  int keep_lo, keep_hi, give_lo, give_hi;
};

// Returns the exchanges of the member with index `number` among `power` members. With
// `near_first` the distances are 1, 2, 4, ...: the exchange with most bytes is with the
// neighbour, likely on the same host. Otherwise the distances are power / 2, ..., 2, 1:
// member i ends with block i.
std::vector<Exchange> Halve(int number, int power, bool near_first) {
  std::vector<Exchange> exchanges;
  int lo = 0, hi = power;
  for (int round = 1; round < power; round *= 2) {
    const int distance = near_first ? round : power / (2 * round);
    const int middle = lo + (hi - lo) / 2;
    if (number & distance) {
      exchanges.push_back({number ^ distance, middle, hi, lo, middle});
      lo = middle;
    } else {
      exchanges.push_back({number ^ distance, lo, middle, middle, hi});
      hi = middle;
    }
  }
  return exchanges;
}

}  // namespace

void AddHalvingAllreduce(ScheduleBuilder* builder, const Group& group, Range whole) {
  const Fold fold(group.size());
  const int own = group.index;
  if (fold.Leaves(own)) {
    builder->Send(group.At(own + 1), whole);
    builder->Recv(group.At(own + 1), whole);
    return;
  }
  if (fold.RepresentsPair(own)) builder->RecvReduce(group.At(own - 1), whole, false);

  const Blocks blocks = Blocks::Even(whole, fold.power);
  const auto exchanges = Halve(fold.Number(own), fold.power, true);
  for (const Exchange& e : exchanges) {
    const int peer = group.At(fold.Rank(e.peer));
    const bool last = e.keep_hi - e.keep_lo == 1;
    builder->Send(peer, blocks.Between(e.give_lo, e.give_hi));
    builder->RecvReduce(peer, blocks.Between(e.keep_lo, e.keep_hi), last);
  }
  for (auto e = exchanges.rbegin(); e != exchanges.rend(); ++e) {
    const int peer = group.At(fold.Rank(e->peer));
    builder->Send(peer, blocks.Between(e->keep_lo, e->keep_hi));
    builder->Recv(peer, blocks.Between(e->give_lo, e->give_hi));
  }
  if (fold.RepresentsPair(own)) builder->Send(group.At(own - 1), whole);
}

Schedule HalvingAllreduce(const Problem& problem, const Topology& topology) {
  const Range whole{0, problem.counts[0]};
  if (topology.size == 1) return Alone(whole.count);
  ScheduleBuilder builder;
  AddHalvingAllreduce(&builder, World(topology), whole);
  return builder.Take();
}

namespace {

// Adds the last exchange of a reduce-scatter: each member sends the blocks of the ranks
// that its peer represents. Element `base` of the vector is the first in scratch.
void FinishBlocks(ScheduleBuilder* builder, const Fold& fold, const Blocks& blocks,
                  int rank, int peer, uint64_t base) {
  for (int r = fold.FirstRank(fold.Number(peer)); r <= peer; ++r)
    builder->Send(peer, blocks.At(r));
  for (int r = fold.FirstRank(fold.Number(rank)); r <= rank; ++r) {
    const Range block = blocks.At(r);
    Slice dst{Region::kOut, 0, block.count};
    if (r != rank) dst = {Region::kScratch, block.offset - base, block.count};
    builder->RecvReduce(peer, block, true, dst);
  }
}

}  // namespace

// No step may write to kIn, so partial results are in scratch, where a rank that
// represents a pair also finishes the block of the even rank. The first exchange is
// with the farthest peer, so that a member ends with the consecutive blocks of the
// ranks that it represents.
Schedule HalvingReducescatter(const Problem& problem, const Topology& topology) {
  if (topology.size == 1) return Alone(problem.counts[0]);
  const Fold fold(topology.size);
  const int rank = topology.rank;
  const Blocks blocks = Blocks::Of(problem.counts);
  ScheduleBuilder builder;
  if (fold.Leaves(rank)) {
    const Range own = blocks.At(rank);
    builder.Send(rank + 1, blocks.whole());
    builder.Recv(rank + 1, own, {Region::kOut, 0, own.count});
    return builder.Take();
  }
  // The blocks of all ranks that members lo .. hi - 1 represent.
  const auto between = [&](int lo, int hi) {
    return blocks.Between(fold.FirstRank(lo), fold.Rank(hi - 1) + 1);
  };
  const auto exchanges = Halve(fold.Number(rank), fold.power, false);
  const Range most = fold.RepresentsPair(rank)
                         ? blocks.whole()
                         : between(exchanges[0].keep_lo, exchanges[0].keep_hi);
  const auto scratch = [&](Range r) -> Slice {
    return {Region::kScratch, r.offset - most.offset, r.count};
  };
  if (fold.RepresentsPair(rank))
    builder.RecvReduce(rank - 1, most, false, scratch(most));
  if (fold.RepresentsPair(rank) || fold.power > 2) builder.ReserveScratch(most.count);
  for (const Exchange& e : exchanges) {
    const Range keep = between(e.keep_lo, e.keep_hi);
    if (e.keep_hi - e.keep_lo == 1) break;
    builder.Send(fold.Rank(e.peer), between(e.give_lo, e.give_hi));
    builder.RecvReduce(fold.Rank(e.peer), keep, false, scratch(keep));
  }
  const int peer = fold.Rank(exchanges.back().peer);
  FinishBlocks(&builder, fold, blocks, rank, peer, most.offset);
  if (fold.RepresentsPair(rank)) builder.Send(rank - 1, blocks.At(rank - 1));
  return builder.Take();
}

namespace {

// Adds the traffic of all exchanges of all members, each exchange `times` times.
void CountHalving(Traffic* traffic, const Fold& fold, bool near_first, double bytes,
                  int times) {
  for (int round = 1; round < fold.power; round *= 2) {
    const int distance = near_first ? round : fold.power / (2 * round);
    for (int v = 0; v < fold.power; ++v)
      traffic->Send(fold.Rank(v), fold.Rank(v ^ distance), times * bytes / (2 * round),
                    times);
  }
}

}  // namespace

double HalvingAllreduceCost(uint64_t bytes, const Network& net) {
  Traffic traffic(net);
  const Fold fold(net.topology.size);
  const auto whole = static_cast<double>(bytes);
  CountHalving(&traffic, fold, true, whole, 2);
  for (int i = 0; i < fold.pairs; ++i) {
    traffic.Send(2 * i, 2 * i + 1, whole);
    traffic.Send(2 * i + 1, 2 * i, whole);
  }
  const int rounds = CeilLog2(fold.power) + (fold.pairs > 0 ? 1 : 0);
  return traffic.Seconds(2 * rounds, Flow::kByRounds);
}

double HalvingReducescatterCost(uint64_t bytes, const Network& net) {
  Traffic traffic(net);
  const Fold fold(net.topology.size);
  const auto whole = static_cast<double>(bytes);
  CountHalving(&traffic, fold, false, whole, 1);
  for (int i = 0; i < fold.pairs; ++i) {
    traffic.Send(2 * i, 2 * i + 1, whole);
    traffic.Send(2 * i + 1, 2 * i, whole / net.topology.size);
  }
  const int rounds = CeilLog2(fold.power) + (fold.pairs > 0 ? 2 : 0);
  return traffic.Seconds(rounds, Flow::kByRounds);
}

}  // namespace ringjax::collective
