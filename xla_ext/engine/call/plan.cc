// Compile turns conflicts between steps into dependencies. See plan.h.
#include "engine/call/plan.h"

#include <algorithm>
#include <compare>
#include <iterator>
#include <map>
#include <utility>

namespace ringjax {
namespace {

bool Reads(const Step& s) { return s.kind != StepKind::kRecv; }
bool Writes(const Step& s) { return s.kind != StepKind::kSend; }

// One access of memory by a step.
struct Access {
  int step;
  bool writes;  // the access is to the `dst` of the step, not to its `src`
  auto operator<=>(const Access&) const = default;
};

// The latest accesses of each element of one memory: the last write, and the reads
// since. A later step needs to wait only for these, because they wait for the earlier
// ones, element by element. Comparing each step with all earlier steps would take
// quadratic time, and a ring has four steps for each rank of the communicator.
class LatestAccesses {
 public:
  // Records a read of `slice` by `step`. Appends the writes that it must follow.
  void Read(const Slice& slice, int step, std::vector<Access>* after) {
    const uint64_t end = slice.offset + slice.count;
    auto it = SplitAt(slice.offset);
    SplitAt(end);
    for (uint64_t at = slice.offset; at < end; at = it->second.end, ++it) {
      if (it == ranges_.end() || it->first > at) {  // no step has used [at, next)
        const uint64_t next = it == ranges_.end() ? end : std::min(end, it->first);
        it = ranges_.emplace_hint(it, at, Range{next, -1, {}});
      }
      if (it->second.writer >= 0) after->push_back({it->second.writer, true});
      it->second.readers.push_back(step);
    }
  }

  // Records a write of `slice` by `step`. Appends the accesses that it must follow.
  void Write(const Slice& slice, int step, std::vector<Access>* after) {
    const uint64_t end = slice.offset + slice.count;
    auto it = SplitAt(slice.offset);
    SplitAt(end);
    while (it != ranges_.end() && it->first < end) {
      const auto& [range_end, writer, readers] = it->second;
      bool read = false;  // whether another step reads it, which waits for the writer
      for (int reader : readers)
        if (reader != step) {
          after->push_back({reader, false});
          read = true;
        }
      if (!read && writer >= 0) after->push_back({writer, true});
      it = ranges_.erase(it);
    }
    ranges_.emplace_hint(it, slice.offset, Range{end, step, {}});
  }

 private:
  struct Range {
    uint64_t end;
    int writer;                // -1 if no step has written the range
    std::vector<int> readers;  // the steps that have read it since
  };
  using Ranges = std::map<uint64_t, Range>;  // the key is the first element

  // Divides the range that `at` lies inside. Returns the first range from `at` on.
  Ranges::iterator SplitAt(uint64_t at) {
    auto next = ranges_.lower_bound(at);
    if (next == ranges_.begin() || (next != ranges_.end() && next->first == at))
      return next;
    Range& range = std::prev(next)->second;
    if (range.end <= at) return next;
    Range rest = range;
    range.end = at;
    return ranges_.emplace_hint(next, at, std::move(rest));
  }

  Ranges ranges_;
};

// The limit that `earlier`, a slice of `step`, sets to `later`, a slice that overlaps
// it.
Dependency Limit(int step, const Slice& earlier, const Slice& later) {
  const bool contained = later.offset >= earlier.offset &&
                         later.offset + later.count <= earlier.offset + earlier.count;
  return {step, contained, contained ? later.offset - earlier.offset : 0};
}

}  // namespace

Plan Compile(const Schedule& schedule, int size, bool in_place) {
  Plan plan;
  plan.scratch = schedule.scratch;
  plan.sends.resize(size);
  plan.receives.resize(size);
  LatestAccesses in, out, scratch;
  const auto memory = [&](Region region) -> LatestAccesses& {
    if (region == Region::kScratch) return scratch;
    return region == Region::kIn && !in_place ? in : out;
  };
  std::vector<Access> earlier;
  for (const Step& step : schedule.steps) {
    const int index = static_cast<int>(plan.steps.size());
    PlannedStep planned{step, Writes(step) ? step.dst.count : step.src.count, {}};
    const auto add_limits = [&](const Slice& slice) {
      std::sort(earlier.begin(), earlier.end());
      const auto end = std::unique(earlier.begin(), earlier.end());
      for (auto it = earlier.begin(); it != end; ++it) {
        const Step& other = schedule.steps[it->step];
        planned.after.push_back(
            Limit(it->step, it->writes ? other.dst : other.src, slice));
      }
      earlier.clear();
    };
    if (Reads(step) && step.src.count > 0) {
      memory(step.src.region).Read(step.src, index, &earlier);
      add_limits(step.src);
    }
    if (Writes(step) && step.dst.count > 0) {
      memory(step.dst.region).Write(step.dst, index, &earlier);
      add_limits(step.dst);
    }
    switch (step.kind) {
      case StepKind::kSend:
        plan.sends[step.peer].push_back(index);
        plan.sent += planned.count;
        break;
      case StepKind::kRecv:
      case StepKind::kRecvReduce:
        plan.receives[step.peer].push_back(index);
        break;
      case StepKind::kCopy:
        plan.copies.push_back(index);
    }
    plan.steps.push_back(std::move(planned));
  }
  for (int p = 0; p < size; ++p)
    if (!plan.sends[p].empty() || !plan.receives[p].empty()) plan.peers.push_back(p);
  return plan;
}

}  // namespace ringjax
