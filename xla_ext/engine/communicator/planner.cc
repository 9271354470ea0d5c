// Implements Planner: chooses routes, caches plans, and finds forced algorithms. See
// planner.h.
#include "engine/communicator/planner.h"

#include <algorithm>

#include "collective/algorithms.h"
#include "engine/call/tiles.h"

namespace ringjax {

RouteInputs Planner::InputsFor(Collective op) const {
  const SharedSegment* segment = state_.endpoints.segment.get();
  return {state_.options.topology, state_.options.cost, Forced(op),
          segment ? segment->inline_bytes() : 0, state_.repairs};
}

bool Planner::IsInline(const Requests& requests) const {
  if (!state_.endpoints.segment || requests.size() != 1 || state_.abort.aborted())
    return false;
  const Request& r = requests[0];
  return ringjax::IsInline(r.problem, r.arithmetic, InputsFor(r.problem.op));
}

uint64_t Planner::RetainedWhenReducedIs(const Request& request) {
  if (!state_.endpoints.segment || request.problem.op != Collective::kAllreduce ||
      request.arithmetic.op == ReduceOp::kAdasum)
    return 0;
  const auto planned = PlanFor(request);
  if (!planned.ok() || planned.value()->route.kind != Route::Kind::kTiles) return 0;
  return ringjax::RetainedWhenReducedIs(request.problem.counts[0], request.arithmetic,
                                        *state_.endpoints.segment);
}

Result<const Planned*> Planner::PlanFor(const Request& request) {
  constexpr size_t kMaxPlans = 512;
  const Problem& problem = request.problem;
  std::vector<uint64_t> key = problem.counts;
  key.push_back(Width(request.arithmetic.dtype));
  key.push_back(static_cast<uint64_t>(problem.root));
  key.push_back(static_cast<uint64_t>(problem.op));
  key.push_back(problem.even ? 1 : 0);
  auto found = plans_.find(key);
  if (found == plans_.end()) {
    if (plans_.size() >= kMaxPlans) plans_.clear();
    RouteInputs inputs = InputsFor(problem.op);
    inputs.inline_bytes = 0;
    const Result<Route> route = RouteOf(problem, request.arithmetic, inputs);
    if (!route.ok()) return route.status();
    RJ_TRY(CheckProblem(problem, state_.size()));
    const bool in_place =
        problem.op == Collective::kAllreduce || problem.op == Collective::kBroadcast;
    const Topology& topology = state_.options.topology;
    Schedule schedule = route.value().algorithm->generate(problem, topology);
    if (route.value().kind == Route::Kind::kRails)
      schedule = collective::BetweenHosts(schedule, topology);
    Planned planned{route.value(), Compile(schedule, state_.size(), in_place)};
    found = plans_.emplace(std::move(key), std::move(planned)).first;
  }
  return &found->second;
}

std::string_view Planner::Forced(Collective op) const {
  std::string_view rest = state_.options.algorithm;
  if (rest.find(':') == rest.npos) return op == Collective::kAllreduce ? rest : "";
  while (!rest.empty()) {
    const std::string_view entry = rest.substr(0, rest.find(','));
    rest.remove_prefix(std::min(rest.size(), entry.size() + 1));
    const size_t colon = entry.find(':');
    if (colon != entry.npos && entry.substr(0, colon) == Name(op))
      return entry.substr(colon + 1);
  }
  return "";
}

Status Planner::CheckForced(Collective op) const {
  const auto forced = Forced(op);
  if (forced.empty()) return OkStatus();
  const CommunicatorOptions& options = state_.options;
  return Choose(op, forced, 0, options.topology, options.cost).status();
}

}  // namespace ringjax
