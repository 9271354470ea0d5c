// The tools of the generators: ranges, blocks, groups of ranks, and a builder of
// schedules that records where the value of every range is at each moment.
//
// Nothing here does I/O or chooses an algorithm. The builder only keeps records, so
// that a generator reads like the paper that it implements.
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

// Returns i modulo n, which is never negative.
inline int Wrap(int i, int n) { return (i % n + n) % n; }

// The blocks of a vector: one range for each member of a group.
class Blocks {
 public:
  Blocks(std::vector<Range> ranges) : ranges_(std::move(ranges)) {}  // NOLINT: implicit
  // Cuts `whole` into `parts` ranges whose sizes differ by at most one, larger ones
  // first.
  static Blocks Even(Range whole, int parts);
  // Returns consecutive ranges of the sizes `counts`, from offset 0.
  static Blocks Of(const std::vector<uint64_t>& counts);

  int size() const { return static_cast<int>(ranges_.size()); }
  Range At(int i) const { return ranges_[static_cast<size_t>(Wrap(i, size()))]; }
  // Returns blocks lo .. hi - 1, which are consecutive in the vector, as one range.
  Range Between(int lo, int hi) const;
  Range whole() const { return Between(0, size()); }
  uint64_t Largest() const;

 private:
  std::vector<Range> ranges_;
};

// A list of ranks, equal on all of them, and the index of this rank in the list.
struct Group {
  std::vector<int> ranks;
  int index = 0;

  int size() const { return static_cast<int>(ranks.size()); }
  int At(int i) const { return ranks[static_cast<size_t>(Wrap(i, size()))]; }
};

Group World(const Topology& topology);

// Returns the ranks of each host. Hosts are in the order of their lowest ranks.
std::vector<std::vector<int>> Hosts(const Topology& topology);

// Builds the schedule of one rank. The *home* of a range is the slice that holds its
// value. At first the home of every range is in kIn, at the offset of the range.
class ScheduleBuilder {
 public:
  ScheduleBuilder() = default;

  // Declares that `home`, a slice of equal length, holds `range`. Appends no step.
  void Move(Range range, Slice home);

  // Each of these functions appends one step, or none if the range is empty. Send,
  // RecvReduce, Copy and Finish read `range` from its home, which must be one slice.
  // Recv, RecvReduce, Copy and Finish make `dst` the home of `range`.
  void Send(int peer, Range range);
  void Recv(int peer, Range range) { Recv(peer, range, OutAt(range)); }
  void Recv(int peer, Range range, Slice dst);
  void RecvReduce(int peer, Range range, bool last) {
    RecvReduce(peer, range, last, OutAt(range));
  }
  void RecvReduce(int peer, Range range, bool last, Slice dst);
  // Copies the range to `dst`, where it is not finished.
  void Copy(Range range, Slice dst) { Copy(range, dst, false); }
  // Copies the range to `dst` and marks it as finished.
  void Finish(Range range) { Finish(range, OutAt(range)); }
  void Finish(Range range, Slice dst) { Copy(range, dst, true); }

  void ReserveScratch(uint64_t elements) { schedule_.scratch = elements; }
  Schedule Take() { return std::move(schedule_); }

 private:
  using Homes = std::map<uint64_t, Slice>;  // disjoint ranges, by offset in the vector

  void Copy(Range range, Slice dst, bool last);
  Slice Held(Range range) const;
  void CutAt(uint64_t offset);
  void JoinWithPrevious(Homes::iterator home);

  Homes homes_;  // the home of any other range is in kIn
  Schedule schedule_;
};

// Returns the schedule of a reduction on a single rank: it copies kIn to kOut with
// prescale and postscale.
Schedule Alone(uint64_t count);

}  // namespace ringjax::collective
