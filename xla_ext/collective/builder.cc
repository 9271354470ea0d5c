// Records which slice holds the value of each range (its home). See builder.h.
#include "collective/builder.h"

#include <algorithm>
#include <iterator>

#include "base/status.h"

namespace ringjax::collective {

Blocks Blocks::Even(Range whole, int parts) {
  const auto n = static_cast<uint64_t>(parts);
  const uint64_t small = whole.count / n, larger = whole.count % n;
  std::vector<Range> ranges;
  for (uint64_t i = 0; i < n; ++i) {
    const uint64_t offset = whole.offset + i * small + std::min(i, larger);
    ranges.push_back({offset, small + (i < larger ? 1 : 0)});
  }
  return ranges;
}

Blocks Blocks::Of(const std::vector<uint64_t>& counts) {
  std::vector<Range> ranges;
  uint64_t offset = 0;
  for (const uint64_t count : counts) {
    ranges.push_back({offset, count});
    offset += count;
  }
  return ranges;
}

Range Blocks::Between(int lo, int hi) const {
  Range all{At(lo).offset, 0};
  for (int i = lo; i < hi; ++i) all.count += At(i).count;
  return all;
}

uint64_t Blocks::Largest() const {
  uint64_t largest = 0;
  for (const Range& range : ranges_) largest = std::max(largest, range.count);
  return largest;
}

Group World(const Topology& topology) {
  Group world{{}, topology.rank};
  for (int r = 0; r < topology.size; ++r) world.ranks.push_back(r);
  return world;
}

std::vector<std::vector<int>> Hosts(const Topology& topology) {
  std::vector<std::vector<int>> hosts;
  std::vector<int> names;
  for (int r = 0; r < topology.size; ++r) {
    const int name = topology.host[static_cast<size_t>(r)];
    const auto known = std::find(names.begin(), names.end(), name);
    const auto h = static_cast<size_t>(known - names.begin());
    if (known == names.end()) {
      names.push_back(name);
      hosts.emplace_back();
    }
    hosts[h].push_back(r);
  }
  return hosts;
}

Slice ScheduleBuilder::Held(Range range) const {
  auto home = homes_.upper_bound(range.offset);
  if (home != homes_.begin()) {
    const auto& [offset, slice] = *std::prev(home);
    const uint64_t shift = range.offset - offset;
    if (shift < slice.count) {
      RJ_CHECK(slice.count - shift >= range.count,
               "a generator used a range that lives in two places");
      return {slice.region, slice.offset + shift, range.count};
    }
  }
  RJ_CHECK(home == homes_.end() || home->first >= range.offset + range.count,
           "a generator used a range that lives in two places");
  return {Region::kIn, range.offset, range.count};
}

void ScheduleBuilder::CutAt(uint64_t offset) {
  auto home = homes_.lower_bound(offset);
  if (home == homes_.begin()) return;
  auto& [begin, slice] = *--home;
  const uint64_t head = offset - begin;
  if (head >= slice.count) return;
  homes_[offset] = {slice.region, slice.offset + head, slice.count - head};
  slice.count = head;
}

// Merges a home with the previous home if they are adjacent in vector and memory.
void ScheduleBuilder::JoinWithPrevious(Homes::iterator home) {
  if (home == homes_.begin() || home == homes_.end()) return;
  auto& [offset, slice] = *std::prev(home);
  const bool joined = offset + slice.count == home->first &&
                      slice.region == home->second.region &&
                      slice.offset + slice.count == home->second.offset;
  if (!joined) return;
  slice.count += home->second.count;
  homes_.erase(home);
}

void ScheduleBuilder::Move(Range range, Slice home) {
  if (range.count == 0) return;
  const uint64_t end = range.offset + range.count;
  CutAt(range.offset);
  CutAt(end);
  homes_.erase(homes_.lower_bound(range.offset), homes_.lower_bound(end));
  homes_[range.offset] = home;
  JoinWithPrevious(homes_.find(end));
  JoinWithPrevious(homes_.find(range.offset));
}

void ScheduleBuilder::Send(int peer, Range range) {
  if (range.count == 0) return;
  const Slice src = Held(range);
  const bool first = src.region == Region::kIn;
  schedule_.steps.push_back({StepKind::kSend, peer, {}, src, first, false});
}

void ScheduleBuilder::Recv(int peer, Range range, Slice dst) {
  if (range.count == 0) return;
  schedule_.steps.push_back({StepKind::kRecv, peer, dst, {}, false, false});
  Move(range, dst);
}

void ScheduleBuilder::RecvReduce(int peer, Range range, bool last, Slice dst) {
  if (range.count == 0) return;
  const Slice src = Held(range);
  const bool first = src.region == Region::kIn;
  schedule_.steps.push_back({StepKind::kRecvReduce, peer, dst, src, first, last});
  Move(range, dst);
}

void ScheduleBuilder::Copy(Range range, Slice dst, bool last) {
  if (range.count == 0) return;
  const Slice src = Held(range);
  const bool first = src.region == Region::kIn;
  schedule_.steps.push_back({StepKind::kCopy, -1, dst, src, first, last});
  Move(range, dst);
}

Schedule Alone(uint64_t count) {
  ScheduleBuilder builder;
  builder.Finish({0, count});
  return builder.Take();
}

}  // namespace ringjax::collective
