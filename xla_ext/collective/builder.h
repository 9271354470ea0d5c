// The pen that generators write schedules with: ranges, blocks, groups of ranks, and a
// builder that knows where the value of every range lives at each moment.
//
// Pure like everything here. It decides nothing about algorithms, it only keeps the
// books, so that a generator reads like the paper it implements.
#pragma once

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "collective/schedule.h"

namespace ringjax::collective {

// Elements [offset, offset + count) of the vector that a collective works on.
struct Range {
  uint64_t offset = 0;
  uint64_t count = 0;
};

inline Slice OutAt(Range r) { return {Region::kOut, r.offset, r.count}; }

// i modulo n, never negative.
inline int Wrap(int i, int n) { return (i % n + n) % n; }

// The ranges that a collective cuts its vector into, one for each member of a group.
class Blocks {
 public:
  Blocks(std::vector<Range> ranges) : ranges_(std::move(ranges)) {}  // NOLINT: implicit
  // `parts` consecutive ranges; sizes differ by at most one, the larger ones first.
  static Blocks Even(Range whole, int parts);
  // Consecutive ranges of these sizes, from 0.
  static Blocks Of(const std::vector<uint64_t>& counts);

  int size() const { return static_cast<int>(ranges_.size()); }
  Range At(int i) const { return ranges_[static_cast<size_t>(Wrap(i, size()))]; }
  // Consecutive blocks lo, lo + 1, ..., hi - 1 as one range.
  Range Between(int lo, int hi) const;
  Range whole() const { return Between(0, size()); }
  uint64_t Largest() const;

 private:
  std::vector<Range> ranges_;
};

// Some ranks, in an order that all of them know, and this rank's place among them.
struct Group {
  std::vector<int> ranks;
  int index = 0;

  int size() const { return static_cast<int>(ranks.size()); }
  int At(int i) const { return ranks[static_cast<size_t>(Wrap(i, size()))]; }
};

Group World(const Topology& topology);

// The ranks of every host, hosts in order of their lowest rank.
std::vector<std::vector<int>> Hosts(const Topology& topology);

class ScheduleBuilder {
 public:
  // Nothing has moved yet: every range lives at its own offset in kIn.
  ScheduleBuilder() = default;

  // From now on `range` lives at `home` (of the same count).
  void Move(Range range, Slice home);

  // These move what `range` holds now, wherever that is. Empty ranges emit nothing.
  void Send(int peer, Range range);
  void Recv(int peer, Range range) { Recv(peer, range, OutAt(range)); }
  void Recv(int peer, Range range, Slice dst);
  void RecvReduce(int peer, Range range, bool last) {
    RecvReduce(peer, range, last, OutAt(range));
  }
  void RecvReduce(int peer, Range range, bool last, Slice dst);
  // kOut holds the finished range afterwards.
  void Finish(Range range) { Finish(range, OutAt(range)); }
  void Finish(Range range, Slice dst);

  void ReserveScratch(uint64_t elements) { schedule_.scratch = elements; }
  Schedule Take() { return std::move(schedule_); }

 private:
  using Homes = std::map<uint64_t, Slice>;  // by offset in the vector; disjoint

  Slice Held(Range range) const;
  void CutAt(uint64_t offset);
  void JoinWithPrevious(Homes::iterator home);

  Homes homes_;  // what is in none of them lives in kIn
  Schedule schedule_;
};

// kOut = kIn, scaled both ways: what every reduction is on one rank.
Schedule Alone(uint64_t count);

}  // namespace ringjax::collective
