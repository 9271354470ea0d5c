// Chooses how the data of a request travel. See route.h.
#include "engine/call/route.h"

#include <algorithm>
#include <numeric>
#include <span>

#include "engine/call/inline_data.h"

namespace ringjax {

std::string_view Route::name() const {
  if (kind >= Kind::kRails) return algorithm->name;
  constexpr std::string_view kNames[] = {"inline", "tiles", "adasum"};
  return kNames[static_cast<size_t>(kind)];
}

bool IsInline(const Problem& problem, const Arithmetic& arithmetic,
              const RouteInputs& inputs) {
  if (inputs.inline_bytes == 0 || arithmetic.op == ReduceOp::kAdasum) return false;
  if (!inputs.algorithm.empty() && inputs.algorithm != kShared) return false;
  // If an epoch ends during an alltoall, a rank cannot see whether the data of all
  // ranks were in the slots, so no rank could complete the call from the slots.
  if (problem.op == Collective::kAlltoall && inputs.repairs) return false;
  const uint64_t most = problem.op == Collective::kAllreduce
                            ? std::min(kMaxInlineAllreduce, inputs.inline_bytes)
                            : inputs.inline_bytes;
  return InlineBytes(problem, arithmetic, inputs.topology.size) <= most;
}

Result<Route> RouteOf(const Problem& problem, const Arithmetic& arithmetic,
                      const RouteInputs& inputs) {
  if (arithmetic.op == ReduceOp::kAdasum) return Route{Route::Kind::kAdasum};
  if (IsInline(problem, arithmetic, inputs)) return Route{Route::Kind::kInline};
  const bool alltoall = problem.op == Collective::kAlltoall;
  const std::span counts(problem.counts);
  const auto sent = alltoall ? counts.first(counts.size() / 2) : counts;
  const uint64_t bytes =
      std::accumulate(sent.begin(), sent.end(), uint64_t{0}) * Width(arithmetic.dtype);
  Result<const Algorithm*> chosen =
      Choose(problem.op, alltoall && !problem.even ? kUneven : inputs.algorithm, bytes,
             inputs.topology, inputs.cost);
  if (!chosen.ok()) return chosen.status();
  const Algorithm* algorithm = chosen.value();
  if (algorithm->name == kShared) return Route{Route::Kind::kTiles, algorithm};
  if (algorithm->name == kHierarchicalShared)
    return Route{Route::Kind::kRails, algorithm};
  return Route{Route::Kind::kSchedule, algorithm};
}

}  // namespace ringjax
