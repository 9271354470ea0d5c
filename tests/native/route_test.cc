// RouteOf over sizes and topologies, and whether calls take the route that it names.
#include "engine/call/route.h"

#include "check.h"
#include "local_world.h"

namespace ringjax {
namespace {

constexpr uint64_t kSlot = 65 << 10;
using Hosts = std::vector<int>;

// Returns the route of a call with `bytes` bytes per rank (of the root in a broadcast).
std::string RouteName(Collective op, const Hosts& hosts, uint64_t bytes,
                      std::string_view algorithm = "", bool resilient = false,
                      ReduceOp reduce_op = ReduceOp::kSum, bool even = false) {
  const auto size = static_cast<int>(hosts.size());
  const bool segment = size > 1 && OnOneHost(hosts);
  const Topology topology{0, size, hosts, segment};
  const CostModel cost;
  Problem problem;
  problem.op = op;
  problem.even = even;
  Arithmetic arithmetic;
  arithmetic.op = reduce_op;
  const uint64_t elements = bytes / sizeof(float), each = elements / hosts.size();
  if (op == Collective::kAllreduce) {
    problem.counts = {elements};
  } else if (op == Collective::kReducescatter) {
    problem.counts.assign(hosts.size(), each);
  } else {
    arithmetic.dtype = arithmetic.wire = DType::kU8;
    if (op == Collective::kBroadcast) problem.counts = {bytes};
    if (op == Collective::kAllgather) problem.counts.assign(hosts.size(), bytes);
    if (op == Collective::kAlltoall)
      problem.counts.assign(2 * hosts.size(), bytes / hosts.size());
  }
  const Result<Route> route = RouteOf(
      problem, arithmetic, {topology, cost, algorithm, segment ? kSlot : 0, resilient});
  if (!route.ok()) return route.status().message();
  return std::string(route.value().name());
}

bool IsSchedule(const std::string& route) {
  return route != "inline" && route != "tiles" && route != "adasum";
}

const std::vector<Hosts> kOneHost = {{0, 0}, {0, 0, 0}, {0, 0, 0, 0, 0}};
const std::vector<Hosts> kSeveralHosts = {{0, 1}, {0, 0, 1}, {0, 0, 1, 1}, {0, 1, 2}};

TEST(RoutesInsideOneHost) {
  for (const Hosts& hosts : kOneHost) {
    for (uint64_t bytes : {4, 64, 4 << 10, 16 << 10})
      CHECK_EQ(RouteName(Collective::kAllreduce, hosts, bytes), "inline");
    for (uint64_t bytes : {(16 << 10) + 4, 1 << 20, 100 << 20})
      CHECK_EQ(RouteName(Collective::kAllreduce, hosts, bytes), "tiles");
    for (Collective op : {Collective::kAllgather, Collective::kBroadcast}) {
      for (uint64_t bytes : {uint64_t{1}, uint64_t{64 << 10}, kSlot})
        CHECK_EQ(RouteName(op, hosts, bytes), "inline");
      // Two ranks copy a long message once, and others write it once for all.
      const bool two = hosts.size() == 2;
      CHECK_EQ(RouteName(op, hosts, kSlot + 1) == "tiles",
               !two || op == Collective::kAllgather);
      CHECK_EQ(RouteName(op, hosts, 1 << 20) == "tiles", !two);
    }
    CHECK_EQ(RouteName(Collective::kReducescatter, hosts, 60 << 10), "inline");
    CHECK_EQ(RouteName(Collective::kReducescatter, hosts, 1 << 20), "tiles");
    for (uint64_t bytes : {8, 1 << 20}) {  // ranks do not know the other lengths
      CHECK_EQ(RouteName(Collective::kAlltoall, hosts, bytes), "inline");
      for (const char* algorithm : {"", "shared"})
        CHECK_EQ(RouteName(Collective::kAlltoall, hosts, bytes, algorithm, true),
                 "pairwise");
      CHECK_EQ(RouteName(Collective::kAlltoall, hosts, bytes, "", true, ReduceOp::kSum,
                         true),
               "tiles");
    }
  }
}

TEST(RoutesBetweenHosts) {
  for (const Hosts& hosts : kSeveralHosts)
    for (Collective op :
         {Collective::kAllreduce, Collective::kAllgather, Collective::kBroadcast,
          Collective::kReducescatter, Collective::kAlltoall})
      for (uint64_t bytes : {64, 64 << 10, 100 << 20})
        CHECK(IsSchedule(RouteName(op, hosts, bytes)));
}

TEST(ShortAlltoallsOfManyRanksOnSeveralHostsTakeFewMessages) {
  const auto route = [&](int per_host, uint64_t bytes, bool even) {
    Hosts hosts(64);
    for (int r = 0; r < 64; ++r) hosts[static_cast<size_t>(r)] = r / per_host;
    return RouteName(Collective::kAlltoall, hosts, bytes, "", false, ReduceOp::kSum,
                     even);
  };
  for (const int per_host : {1, 8}) {
    CHECK_EQ(route(per_host, 4 << 10, true), per_host == 1 ? "bruck" : "hierarchical");
    CHECK_EQ(route(per_host, 4 << 10, false), "pairwise");
    CHECK_EQ(route(per_host, 16 << 20, true), "pairwise");
  }
  // Now all 64 ranks are on one host, and have no shared segment.
  const Topology one_host{0, 64, Hosts(64)};
  CHECK_EQ(Choose(Collective::kAlltoall, "", 4 << 10, one_host, {}).value()->name,
           "pairwise");
}

TEST(RoutesOfRequestedAlgorithms) {
  const auto op = Collective::kAllreduce;
  for (uint64_t bytes : {64, 1 << 20}) {
    CHECK_EQ(RouteName(op, {0, 0, 0}, bytes, "ring"), "ring");
    CHECK_EQ(RouteName(op, {0, 0, 1}, bytes, "ring"), "ring");
    for (const Hosts& hosts : {Hosts{0, 0}, Hosts{0, 1}})
      CHECK_EQ(RouteName(op, hosts, bytes, "", false, ReduceOp::kAdasum), "adasum");
  }
  CHECK_EQ(RouteName(op, {0, 0}, 64, "shared"), "inline");
  CHECK_EQ(RouteName(op, {0, 0}, 1 << 20, "shared"), "tiles");
  CHECK(RouteName(op, {0, 1}, 64, "shared").find("shared") != std::string::npos);
  CHECK(RouteName(op, {0, 0}, 64, "rings").find("no such algorithm") !=
        std::string::npos);
}

// Checks alltoalls of several lengths. Each rank sends `more` rows more to rank 0.
void CheckAlltoalls(Communicator& c, size_t size, int64_t more) {
  for (const int64_t n : {0, 1, 7, 5000}) {
    std::vector<float> in, want;
    std::vector<int64_t> rows(2 * size, n);
    rows[0] += more;
    if (c.rank() == 0) std::fill(rows.begin() + size, rows.end(), n + more);
    for (size_t r = 0; r < size; ++r) {
      in.insert(in.end(), rows[r], static_cast<float>(c.rank() * 100 + r));
      want.insert(want.end(), rows[size + r], static_cast<float>(r * 100 + c.rank()));
    }
    std::vector<float> out(want.size());
    Call call = AllgatherOf(&in, &out, rows);
    call.op = Collective::kAlltoall;
    CHECK(c.Run(call).ok());
    CHECK(out == want);
  }
}

// Runs even and uneven alltoalls, of which only the even ones use `algorithm`.
void CheckForced(const Hosts& hosts, const std::string& algorithm) {
  World world(hosts, "alltoall:" + algorithm);
  world.Each([&](Communicator& c) {
    CheckAlltoalls(c, hosts.size(), 0);
    CheckAlltoalls(c, hosts.size(), 1);
  });
  const auto counts = world.ranks[0]->log().stats().at("alltoall").algorithms;
  CHECK_EQ(counts.size(), 2u);
  CHECK_EQ(counts.at(algorithm), 4u);
  CHECK_EQ(counts.at("pairwise"), 4u);
}

TEST(OnlyEvenAlltoallsOfSeveralHostsUseBrucksAlgorithm) {
  for (const size_t size : {2, 3, 5, 7, 16}) {
    for (size_t per_host = 1; per_host < std::min<size_t>(size, 4); ++per_host) {
      Hosts hosts;
      for (size_t r = 0; r < size; ++r) hosts.push_back(static_cast<int>(r / per_host));
      CheckForced(hosts, "bruck");
    }
  }
}

TEST(OnlyEvenAlltoallsOfEvenHostsAreHierarchical) {
  for (const Hosts& hosts :
       {Hosts{0, 0, 1, 1}, Hosts{0, 1, 1, 0}, Hosts{0, 1, 2, 0, 1, 2},
        Hosts{0, 0, 0, 1, 1, 1}, Hosts{0, 0, 1, 1, 2, 2, 3, 3, 4, 4}})
    CheckForced(hosts, "hierarchical");
}

TEST(CountsThatDifferAreNotEven) {
  Problem problem{Collective::kAlltoall, 0, {1, 1, 1, 2}, true};
  CHECK(CheckProblem(problem, 2).code() == Code::kInvalidArgument);
  problem.even = false;
  CHECK(CheckProblem(problem, 2).ok());
}

TEST(AlltoallsOfOneHostCannotUseBrucksAlgorithm) {
  for (const Hosts& hosts : {Hosts{0}, Hosts{0, 0}, Hosts(64)})
    CHECK(RouteName(Collective::kAlltoall, hosts, 64, "bruck", false, ReduceOp::kSum,
                    true)
              .find("needs several hosts") != std::string::npos);
}

// The statistics count inline data and tiles as one algorithm, "shared".
TEST(CallsTakeTheirRoutes) {
  for (const Hosts& hosts : {Hosts{0, 0, 0}, Hosts{0, 0, 1}}) {
    for (uint64_t bytes : {64, 16 << 10, (16 << 10) + 4, 1 << 20}) {
      World world(hosts);
      world.Each([&](Communicator& c) {
        std::vector<float> data(bytes / sizeof(float), 1.0f);
        CHECK(c.Run(AllreduceOf(&data)).ok());
      });
      const std::string route = RouteName(Collective::kAllreduce, hosts, bytes);
      const auto counts = world.ranks[0]->log().stats().at("allreduce").algorithms;
      CHECK_EQ(counts.size(), 1u);
      CHECK_EQ(std::string(counts.begin()->first),
               IsSchedule(route) ? route : "shared");
    }
  }
}

}  // namespace
}  // namespace ringjax
