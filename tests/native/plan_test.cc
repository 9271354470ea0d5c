// The dependencies of plans. Compile lists only the latest accesses of each element;
// the tests compare the order that results with all conflicts between all steps.
#include "engine/call/plan.h"

#include <algorithm>
#include <random>

#include "check.h"
#include "collective/table.h"

namespace ringjax {
namespace {

// The element of a slice at `position` of its memory, or -1.
int64_t ElementAt(const Slice& slice, uint64_t position) {
  if (position < slice.offset || position >= slice.offset + slice.count) return -1;
  return static_cast<int64_t>(position - slice.offset);
}

bool SameMemory(Region a, Region b, bool in_place) {
  return a == b || (in_place && a != Region::kScratch && b != Region::kScratch);
}

// Calls `body(earlier step, its slice, slice of `later`)` for all conflicts.
template <typename Body>
void ForEachConflict(const Plan& plan, size_t later, bool in_place, const Body& body) {
  const Step& s = plan.steps[later].step;
  const auto both = [&](size_t e, const Slice& first, const Slice& second) {
    if (SameMemory(first.region, second.region, in_place)) body(e, first, second);
  };
  for (size_t e = 0; e < later; ++e) {
    const Step& earlier = plan.steps[e].step;
    const bool writes = earlier.kind != StepKind::kSend;
    if (writes && s.kind != StepKind::kRecv) both(e, earlier.dst, s.src);
    if (writes && s.kind != StepKind::kSend) both(e, earlier.dst, s.dst);
    if (earlier.kind != StepKind::kRecv && s.kind != StepKind::kSend)
      both(e, earlier.src, s.dst);
  }
}

// How many elements of a step may move, if each waits for all conflicting accesses of
// its own position.
uint64_t AllowedByElement(const Plan& plan, const std::vector<uint64_t>& done,
                          size_t step, bool in_place) {
  uint64_t allowed = plan.steps[step].count;
  ForEachConflict(plan, step, in_place,
                  [&](size_t e, const Slice& first, const Slice& second) {
                    for (uint64_t i = 0; i < allowed; ++i) {
                      const int64_t at = ElementAt(first, second.offset + i);
                      if (at >= static_cast<int64_t>(done[e])) allowed = i;
                    }
                  });
  return allowed;
}

// How many may move, if the step waits for the whole of each earlier step that
// conflicts with it and does not contain it.
uint64_t AllowedByStep(const Plan& plan, const std::vector<uint64_t>& done, size_t step,
                       bool in_place) {
  uint64_t allowed = plan.steps[step].count;
  ForEachConflict(
      plan, step, in_place, [&](size_t e, const Slice& first, const Slice& second) {
        if (done[e] == plan.steps[e].count ||
            first.offset >= second.offset + second.count ||
            second.offset >= first.offset + first.count)
          return;
        const bool contained = ElementAt(first, second.offset) >= 0 &&
                               ElementAt(first, second.offset + second.count - 1) >= 0;
        const uint64_t shift = contained ? second.offset - first.offset : done[e];
        allowed = std::min(allowed, done[e] > shift ? done[e] - shift : 0);
      });
  return allowed;
}

uint64_t AllowedByPlan(const Plan& plan, const std::vector<uint64_t>& done,
                       size_t step) {
  uint64_t allowed = plan.steps[step].count;
  for (const Dependency& d : plan.steps[step].after) {
    if (done[d.step] == plan.steps[d.step].count) continue;
    const uint64_t least = d.contained ? d.shift : done[d.step];
    allowed = std::min(allowed, done[d.step] > least ? done[d.step] - least : 0);
  }
  return allowed;
}

// Executes the steps of a plan in a random order, a random number of elements at a
// time. In each state the plan must not permit more than is right, and not less than a
// plan with all conflicts would.
void ExecuteAtRandom(const Plan& plan, bool in_place, std::mt19937* random) {
  std::vector<uint64_t> done(plan.steps.size(), 0);
  std::vector<size_t> left(plan.steps.size());
  for (size_t i = 0; i < left.size(); ++i) left[i] = i;
  while (!left.empty()) {
    bool moved = false;
    std::shuffle(left.begin(), left.end(), *random);
    for (size_t step : left) {
      const uint64_t allowed = AllowedByPlan(plan, done, step);
      CHECK(allowed >= AllowedByStep(plan, done, step, in_place));
      if (allowed <= done[step]) continue;
      CHECK(allowed <= AllowedByElement(plan, done, step, in_place));
      done[step] += 1 + (*random)() % (allowed - done[step]);
      moved = true;
    }
    CHECK(moved);
    if (!moved) return;
    std::erase_if(left, [&](size_t s) { return done[s] == plan.steps[s].count; });
  }
}

Problem ProblemOf(Collective op, uint64_t size, uint64_t elements) {
  Problem problem{op, 0, {}};
  if (op == Collective::kAllreduce || op == Collective::kBroadcast)
    problem.counts = {elements};
  if (op == Collective::kAllgather || op == Collective::kReducescatter)
    problem.counts.assign(size, elements);
  if (op == Collective::kAlltoall) problem.counts.assign(2 * size, elements);
  return problem;
}

template <typename Body>
void ForEachAlgorithm(const std::vector<int>& hosts, const Body& body) {
  const int size = static_cast<int>(hosts.size());
  for (const Algorithm& algorithm : Algorithms())
    for (int rank : {0, size / 2, size - 1}) {
      const Topology topology{rank, size, hosts};
      if (algorithm.name != kShared && algorithm.applies(topology))
        body(algorithm, topology);
    }
}

TEST(APlanPermitsWhatAllConflictsPermit) {
  std::mt19937 random(41);
  for (const std::vector<int>& hosts : std::vector<std::vector<int>>{
           {0, 0}, {0, 1, 1}, {0, 0, 1, 1}, {0, 0, 0, 1, 1}, {0, 0, 0, 1, 1, 1, 2, 2}})
    ForEachAlgorithm(hosts, [&](const Algorithm& algorithm, const Topology& topology) {
      for (uint64_t elements : {1, 3, 40}) {
        const Problem problem = ProblemOf(algorithm.op, hosts.size(), elements);
        const Schedule schedule = algorithm.generate(problem, topology);
        const bool may_alias = algorithm.op == Collective::kAllreduce ||
                               algorithm.op == Collective::kBroadcast;
        for (bool in_place : {false, true})
          if (may_alias || !in_place)
            ExecuteAtRandom(Compile(schedule, topology.size, in_place), in_place,
                            &random);
      }
    });
}

// Slices that no generator makes: any steps over a few elements.
TEST(APlanOfRandomStepsPermitsWhatAllConflictsPermit) {
  std::mt19937 random(42);
  for (int round = 0; round < 2000; ++round) {
    Schedule schedule{{}, 12};
    const auto slice = [&](uint64_t count) {
      return Slice{static_cast<Region>(random() % 3), random() % (13 - count), count};
    };
    for (int i = 0; i < 10; ++i) {
      const auto kind = static_cast<StepKind>(random() % 4);
      const uint64_t count = 1 + random() % 6;
      Step step{kind, kind == StepKind::kCopy ? -1 : 1, {}, {}};
      if (kind != StepKind::kSend) step.dst = slice(count);
      if (kind != StepKind::kRecv) step.src = slice(count);
      const bool apart = step.src.offset + step.src.count <= step.dst.offset ||
                         step.dst.offset + step.dst.count <= step.src.offset;
      if (!apart) step.src.offset = step.dst.offset;  // a step never shifts data
      schedule.steps.push_back(step);
    }
    for (bool in_place : {false, true})
      ExecuteAtRandom(Compile(schedule, 2, in_place), in_place, &random);
  }
}

// A step of a ring depends on few others, so a plan of 300 ranks is not 300 times as
// large for each of its steps.
TEST(DependenciesGrowWithTheStepsOnly) {
  std::vector<int> hosts(300);
  for (size_t r = 0; r < hosts.size(); ++r) hosts[r] = static_cast<int>(r) / 4;
  ForEachAlgorithm(hosts, [&](const Algorithm& algorithm, const Topology& topology) {
    const Problem problem = ProblemOf(algorithm.op, hosts.size(), 3000);
    const Plan plan =
        Compile(algorithm.generate(problem, topology), topology.size, true);
    size_t dependencies = 0;
    for (const PlannedStep& step : plan.steps) dependencies += step.after.size();
    CHECK(dependencies <= 8 * plan.steps.size());
  });
}

}  // namespace
}  // namespace ringjax
