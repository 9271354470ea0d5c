// Binds the code of collective/: the algorithms, schedules as dicts, and the verifier.
#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cmath>

#include "binding/module.h"
#include "collective/table.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace ringjax {
namespace {

constexpr std::string_view kKinds[] = {"send", "recv", "recv_reduce", "copy"};
constexpr std::string_view kRegions[] = {"in", "out", "scratch"};

std::string Text(std::string_view s) { return std::string(s); }

template <size_t N>
int IndexOf(const std::string_view (&names)[N], const std::string& name) {
  for (size_t i = 0; i < N; ++i)
    if (names[i] == name) return static_cast<int>(i);
  throw nb::value_error(("ringjax: unknown name '" + name + "'").c_str());
}

Collective OpOf(const std::string& name) {
  return static_cast<Collective>(IndexOf(kCollectiveNames, name));
}

const Algorithm& AlgorithmOf(const std::string& op, const std::string& name) {
  const Algorithm* found = Find(OpOf(op), name);
  if (!found)
    throw nb::value_error(("ringjax: no algorithm '" + name + "' for " + op).c_str());
  return *found;
}

using Counts = std::vector<std::vector<uint64_t>>;

std::vector<Problem> Problems(const std::string& op, const Counts& counts, int root) {
  std::vector<Problem> problems;
  const bool even = OpOf(op) == Collective::kAlltoall && !counts.empty() &&
                    !counts[0].empty() &&
                    std::all_of(counts.begin(), counts.end(), [&](const auto& c) {
                      return c == std::vector(c.size(), counts[0][0]);
                    });
  for (const auto& c : counts) problems.push_back({OpOf(op), root, c, even});
  for (const Problem& p : problems)
    if (Status s = CheckProblem(p, static_cast<int>(counts.size())); !s.ok())
      throw nb::value_error(s.message().c_str());
  return problems;
}

nb::tuple ToTuple(const Slice& s) {
  return nb::make_tuple(Text(kRegions[static_cast<int>(s.region)]), s.offset, s.count);
}

Slice ToSlice(const nb::handle& t) {
  const auto [region, offset, count] =
      nb::cast<std::tuple<std::string, uint64_t, uint64_t>>(t);
  return {static_cast<Region>(IndexOf(kRegions, region)), offset, count};
}

nb::list ToList(const Schedule& schedule) {
  nb::list steps;
  for (const Step& s : schedule.steps) {
    nb::dict d;
    d["kind"] = Text(kKinds[static_cast<int>(s.kind)]);
    d["peer"] = s.peer;
    d["dst"] = ToTuple(s.dst);
    d["src"] = ToTuple(s.src);
    d["first"] = s.first;
    d["last"] = s.last;
    steps.append(d);
  }
  return steps;
}

// Reads the steps of a schedule. The scratch region becomes as large as the steps need.
Schedule FromList(const std::vector<nb::dict>& steps) {
  Schedule schedule;
  for (const nb::dict& d : steps) {
    Step s;
    s.kind = static_cast<StepKind>(IndexOf(kKinds, nb::cast<std::string>(d["kind"])));
    s.peer = nb::cast<int>(d["peer"]);
    s.dst = ToSlice(d["dst"]);
    s.src = ToSlice(d["src"]);
    s.first = nb::cast<bool>(d["first"]);
    s.last = nb::cast<bool>(d["last"]);
    for (const Slice& slice : {s.dst, s.src})
      if (slice.region == Region::kScratch)
        schedule.scratch = std::max(schedule.scratch, slice.offset + slice.count);
    schedule.steps.push_back(s);
  }
  return schedule;
}

nb::dict ToDict(const Report& report) {
  nb::dict d;
  d["ok"] = report.ok;
  d["error"] = report.error;
  d["steps"] = report.steps;
  d["sent"] = report.sent;
  d["messages"] = report.messages;
  return d;
}

struct Constant {
  const char* name;
  double CostModel::* value;
};
constexpr Constant kConstants[] = {
    {"local_latency", &CostModel::local_latency},
    {"remote_latency", &CostModel::remote_latency},
    {"local_message", &CostModel::local_message},
    {"remote_message", &CostModel::remote_message},
    {"local_byte", &CostModel::local_byte},
    {"remote_byte", &CostModel::remote_byte},
};

}  // namespace

CostModel ReadCost(const nb::dict& cost) {
  CostModel model;
  size_t known = 0;
  for (const Constant& c : kConstants) {
    if (!cost.contains(c.name)) continue;
    ++known;
    model.*c.value = nb::cast<double>(cost[c.name]);
    if (!(model.*c.value > 0) || !std::isfinite(model.*c.value))
      throw nb::value_error("ringjax: a cost must be a positive number of seconds");
  }
  if (known != cost.size()) throw nb::value_error("ringjax: an unknown cost");
  return model;
}

nb::dict WriteCost(const CostModel& model) {
  nb::dict cost;
  for (const Constant& c : kConstants) cost[c.name] = model.*c.value;
  return cost;
}

void BindSchedules(nb::module_& m) {
  m.def("algorithms", [] {
    std::vector<std::pair<std::string, std::string>> all;
    for (const Algorithm& a : Algorithms())
      all.push_back({Text(Name(a.op)), Text(a.name)});
    return all;
  });
  m.def(
      "applies",
      [](const std::string& op, const std::string& algorithm,
         const std::vector<int>& host) {
        return AlgorithmOf(op, algorithm)
            .applies({0, static_cast<int>(host.size()), host, true});
      },
      "op"_a, "algorithm"_a, "host"_a);
  m.def(
      "schedule",
      [](const std::string& op, const std::string& algorithm, int rank,
         const Counts& counts, const std::vector<int>& host, int root) {
        const auto problems = Problems(op, counts, root);
        if (rank < 0 || rank >= static_cast<int>(problems.size()))
          throw nb::value_error("ringjax: rank is out of range");
        return ToList(
            AlgorithmOf(op, algorithm)
                .generate(problems[rank], {rank, static_cast<int>(host.size()), host}));
      },
      "op"_a, "algorithm"_a, "rank"_a, "counts"_a, "host"_a, "root"_a = 0);
  m.def(
      "verify",
      [](const std::string& op, const std::string& algorithm, const Counts& counts,
         const std::vector<int>& host, int root) {
        return ToDict(
            Verify(AlgorithmOf(op, algorithm), Problems(op, counts, root), host));
      },
      "op"_a, "algorithm"_a, "counts"_a, "host"_a, "root"_a = 0);
  m.def(
      "verify_schedules",
      [](const std::string& op, const std::vector<std::vector<nb::dict>>& schedules,
         const Counts& counts, int root) {
        std::vector<Schedule> all;
        for (const auto& steps : schedules) all.push_back(FromList(steps));
        return ToDict(VerifySchedules(Problems(op, counts, root), all));
      },
      "op"_a, "schedules"_a, "counts"_a, "root"_a = 0);
  m.def(
      "predict",
      [](const std::string& op, uint64_t bytes, const std::vector<int>& host,
         const nb::dict& cost) {
        const Topology topology{0, static_cast<int>(host.size()), host, true};
        const CostModel model = ReadCost(cost);
        std::vector<std::pair<std::string, double>> all;
        for (const Algorithm& a : Algorithms())
          if (a.op == OpOf(op) && a.applies(topology))
            all.push_back({Text(a.name), a.cost(bytes, {topology, model})});
        return all;
      },
      "op"_a, "bytes"_a, "host"_a, "cost"_a = nb::dict());
}

}  // namespace ringjax
