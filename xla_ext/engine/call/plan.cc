// Compile turns conflicts between steps into dependencies. See plan.h.
#include "engine/call/plan.h"

namespace ringjax {
namespace {

bool Reads(const Step& s) { return s.kind != StepKind::kRecv; }
bool Writes(const Step& s) { return s.kind != StepKind::kSend; }

bool SameMemory(Region a, Region b, bool in_place) {
  if (a == b) return true;
  return in_place && a != Region::kScratch && b != Region::kScratch;
}

// Appends a dependency on the earlier step with index `step` if its slice `earlier`
// overlaps `later`, a slice of the dependent step.
void Conflict(const Slice& earlier, int step, const Slice& later, bool in_place,
              std::vector<Dependency>* after) {
  if (!SameMemory(earlier.region, later.region, in_place)) return;
  const uint64_t e_end = earlier.offset + earlier.count;
  const uint64_t l_end = later.offset + later.count;
  if (earlier.offset >= l_end || later.offset >= e_end) return;
  const bool contained = later.offset >= earlier.offset && l_end <= e_end;
  after->push_back({step, contained, contained ? later.offset - earlier.offset : 0});
}

}  // namespace

Plan Compile(const Schedule& schedule, int size, bool in_place) {
  Plan plan;
  plan.scratch = schedule.scratch;
  plan.sends.resize(size);
  plan.receives.resize(size);
  for (const Step& step : schedule.steps) {
    const int index = static_cast<int>(plan.steps.size());
    PlannedStep planned{step, Writes(step) ? step.dst.count : step.src.count, {}};
    for (int e = 0; e < index; ++e) {
      const Step& earlier = plan.steps[e].step;
      auto& after = planned.after;
      if (Writes(earlier) && Reads(step))
        Conflict(earlier.dst, e, step.src, in_place, &after);
      if (Writes(earlier) && Writes(step))
        Conflict(earlier.dst, e, step.dst, in_place, &after);
      if (Reads(earlier) && Writes(step))
        Conflict(earlier.src, e, step.dst, in_place, &after);
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
