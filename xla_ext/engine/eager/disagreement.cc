// Finds the first property in which submissions differ, groups the ranks by its value,
// and formats error messages. See disagreement.h.
#include "engine/eager/disagreement.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "engine/call/descriptor.h"

namespace ringjax {
namespace {

// The properties of a submission, in the order in which Compare checks them. Dtype and
// shape are checked tensor by tensor: both of one tensor before those of the next.
enum class Aspect {
  kDevices,
  kNumbers,
  kDTypes,
  kShapes,
  kReduceOps,
  kRoots,
  kFactors
};

struct Difference {
  Aspect aspect;
  size_t tensor = 0;
  auto Order() const {
    const bool after = aspect >= Aspect::kReduceOps;
    const bool before = aspect <= Aspect::kNumbers;
    return std::tuple(before ? 0 : after ? 2 : 1, tensor, aspect);
  }
};

// Returns whether two factors count as equal. Unlike with ==, two NaNs do.
bool SameText(double a, double b) { return a == b || (a != a && b != b); }

bool EqualDims(std::span<const int64_t> a, std::span<const int64_t> b, bool ragged) {
  if (a.size() != b.size()) return false;
  const auto skip = ragged && !a.empty() ? 1 : 0;
  return std::equal(a.begin() + skip, a.end(), b.begin() + skip);
}

// Returns whether two submissions differ in a property that must be equal. If so, sets
// `*difference` to the first such property.
bool Differ(const Submission& a, const Submission& b, Difference* difference) {
  auto in = [&](Aspect aspect, size_t tensor = 0) {
    *difference = {aspect, tensor};
    return true;
  };
  if (a.cuda != b.cuda) return in(Aspect::kDevices);
  if (a.tensors.size() != b.tensors.size()) return in(Aspect::kNumbers);
  for (size_t i = 0; i < a.tensors.size(); ++i) {
    if (a.tensors[i].dtype != b.tensors[i].dtype) return in(Aspect::kDTypes, i);
    if (!EqualDims(a.tensors[i].dims, b.tensors[i].dims, RaggedRows(a.op)))
      return in(Aspect::kShapes, i);
  }
  if (a.Reduces()) {
    if (a.reduce_op != b.reduce_op) return in(Aspect::kReduceOps);
    if (!SameText(a.prescale, b.prescale) || !SameText(a.postscale, b.postscale))
      return in(Aspect::kFactors);
  }
  if (a.op == Collective::kBroadcast && a.root != b.root) return in(Aspect::kRoots);
  return false;
}

// The plural nouns in error messages, in the order of the enumerators of Aspect.
constexpr std::string_view kPlurals[] = {"devices", "numbers of tensors", "dtypes",
                                         "shapes",  "reduce ops",         "root ranks",
                                         "factors"};

// Returns the value of the property `d.aspect` of a submission as text. GroupRanks puts
// ranks with equal texts into one group.
std::string ValueText(const Submission& s, const Difference& d,
                      const std::vector<int>& members) {
  switch (d.aspect) {
    case Aspect::kDevices:
      return s.cuda ? "CUDA tensors" : "host tensors";
    case Aspect::kNumbers:
      return std::to_string(s.tensors.size()) +
             (s.tensors.size() == 1 ? " tensor" : " tensors");
    case Aspect::kDTypes:
      return std::string(Name(s.tensors[d.tensor].dtype));
    case Aspect::kShapes:
      return Describe(s.tensors[d.tensor], RaggedRows(s.op));
    case Aspect::kReduceOps:
      return "op=" + std::string(Name(s.reduce_op));
    case Aspect::kRoots:
      return "root_rank=" + std::to_string(members[static_cast<size_t>(s.root)]);
    case Aspect::kFactors:
      break;
  }
  return "prescale_factor=" + Digits(s.prescale) +
         " postscale_factor=" + Digits(s.postscale);
}

// The ranks whose submissions have the same ValueText.
struct Group {
  std::string value;
  std::vector<int> ranks;
};

// Groups the ranks by ValueText. The largest group comes first, so that the few ranks
// that differ from most ranks come last.
std::vector<Group> GroupRanks(const SubmissionsByRank& by_rank, const Difference& d,
                              const std::vector<int>& members) {
  std::vector<Group> groups;
  for (size_t r = 0; r < by_rank.size(); ++r) {
    if (!by_rank[r]) continue;
    std::string value = ValueText(*by_rank[r], d, members);
    const auto group = std::find_if(groups.begin(), groups.end(),
                                    [&](const Group& p) { return p.value == value; });
    if (group == groups.end())
      groups.push_back({std::move(value), {static_cast<int>(r)}});
    else
      group->ranks.push_back(static_cast<int>(r));
  }
  std::stable_sort(groups.begin(), groups.end(), [](const Group& a, const Group& b) {
    return a.ranks.size() > b.ranks.size();
  });
  return groups;
}

constexpr size_t kMaxGroups = 4;  // groups of ranks in one text
constexpr size_t kMaxRanges = 8;  // ranges of ranks in one list

}  // namespace

Status Compare(const SubmissionsByRank& by_rank, const std::vector<int>& members) {
  const Submission* first = nullptr;
  Difference difference{}, earliest{};
  bool differ = false;
  for (size_t r = 0; r < by_rank.size(); ++r) {
    const SubmissionPtr& s = by_rank[r];
    if (!s) continue;
    if (!first) first = s.get();
    if (s.get() == first || !Differ(*first, *s, &difference)) continue;
    if (!differ || difference.Order() < earliest.Order()) earliest = difference;
    differ = true;
  }
  if (!differ) return OkStatus();
  const auto groups = GroupRanks(by_rank, earliest, members);
  std::string text = "Mismatched " +
                     std::string(kPlurals[static_cast<size_t>(earliest.aspect)]) +
                     " of " + first->Title();
  const bool of_tensor =
      earliest.aspect == Aspect::kDTypes || earliest.aspect == Aspect::kShapes;
  if (of_tensor && first->tensors.size() > 1)
    text += ", tensor " + std::to_string(earliest.tensor);
  for (size_t i = 0; i < std::min(groups.size(), kMaxGroups); ++i)
    text += (i == 0 ? ": " : ", ") + RankList(groups[i].ranks, members) + " sent " +
            groups[i].value;
  if (groups.size() > kMaxGroups) text += ", others sent others";
  return Status(Code::kMismatch, std::move(text),
                members[static_cast<size_t>(groups[1].ranks[0])]);
}

std::string RankList(const std::vector<int>& ranks, const std::vector<int>& members) {
  std::vector<int> world;
  for (int r : ranks) world.push_back(members[static_cast<size_t>(r)]);
  std::sort(world.begin(), world.end());
  std::string text = world.size() == 1 ? "rank " : "ranks ";
  size_t ranges = 0;
  for (size_t i = 0, end = 0; i < world.size(); i = end, ++ranges) {
    if (ranges == kMaxRanges)
      return text + " and " + std::to_string(world.size() - i) + " more";
    for (end = i + 1; end < world.size() && world[end] == world[end - 1] + 1;) ++end;
    if (end == i + 2) --end;  // "0, 1" rather than "0-1"
    if (ranges > 0) text += ", ";
    text += std::to_string(world[i]);
    if (end > i + 1) text += "-" + std::to_string(world[end - 1]);
  }
  return text;
}

std::string MissingText(const Negotiation::Waiting& waiting,
                        const std::vector<int>& members, double seconds) {
  std::string text = RankList(waiting.missing, members);
  text += waiting.missing.size() == 1 ? " has" : " have";
  text +=
      " not submitted " + waiting.any->Describe() + " for " + Digits(seconds) + " s";
  if (!waiting.hint.empty()) text += "; " + waiting.hint;
  return text;
}

}  // namespace ringjax
