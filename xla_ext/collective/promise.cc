// The promises of the collectives, in elements. See promise.h.
#include "collective/promise.h"

#include <string>

#include "collective/table.h"

namespace ringjax::symbolic {
namespace {

uint64_t Sum(const std::vector<uint64_t>& counts, size_t begin, size_t end) {
  uint64_t sum = 0;
  for (size_t i = begin; i < end; ++i) sum += counts[i];
  return sum;
}

}  // namespace

Promise PromiseTo(int rank, const std::vector<Problem>& problems) {
  const auto r = static_cast<size_t>(rank), size = problems.size();
  const Problem& problem = problems[r];
  const std::vector<uint64_t>& counts = problem.counts;
  switch (problem.op) {
    case Collective::kAllreduce:
      return {counts[0], counts[0], {{counts[0], -1, 0}}};
    case Collective::kBroadcast:
      return {counts[0], counts[0], {{counts[0], problem.root, 0}}};
    case Collective::kReducescatter:
      return {Sum(counts, 0, size), counts[r], {{counts[r], -1, Sum(counts, 0, r)}}};
    case Collective::kAllgather: {
      Promise promise{counts[r], Sum(counts, 0, size), {}};
      for (size_t s = 0; s < size; ++s)
        promise.parts.push_back({counts[s], static_cast<int>(s), 0});
      return promise;
    }
    case Collective::kAlltoall: {
      Promise promise{Sum(counts, 0, size), Sum(counts, size, 2 * size), {}};
      for (size_t s = 0; s < size; ++s)
        promise.parts.push_back(
            {counts[size + s], static_cast<int>(s), Sum(problems[s].counts, 0, r)});
      return promise;
    }
    case Collective::kBarrier:
      break;
  }
  return {};
}

bool Reduces(Collective op) {
  return op == Collective::kAllreduce || op == Collective::kReducescatter;
}

Status CheckAgreement(const std::vector<Problem>& problems) {
  const auto size = problems.size();
  for (const Problem& problem : problems) {
    RJ_TRY(CheckProblem(problem, static_cast<int>(size)));
    const Problem& other = problems[0];
    const bool same =
        problem.op == other.op && problem.root == other.root &&
        (problem.op == Collective::kAlltoall || problem.counts == other.counts);
    if (!same) return {Code::kInvalidArgument, "the ranks' problems disagree"};
  }
  if (size == 0 || problems[0].op != Collective::kAlltoall) return {};
  for (size_t i = 0; i < size; ++i) {
    for (size_t j = 0; j < size; ++j)
      if (problems[i].counts[j] != problems[j].counts[size + i])
        return {Code::kInvalidArgument, "rank " + std::to_string(i) +
                                            " does not send to rank " +
                                            std::to_string(j) + " what that expects"};
  }
  return {};
}

}  // namespace ringjax::symbolic
