// An allreduce through the segments of several hosts: the schedule that its phases make
// together, its results, and hosts or ranks that fail.
#include "engine/call/rails.h"

#include <atomic>
#include <cstring>
#include <functional>
#include <random>

#include "check.h"
#include "collective/algorithms.h"
#include "link_ends.h"
#include "local_world.h"

namespace ringjax {
namespace {

constexpr size_t kRailTile = 4096;
using HostOfRank = std::vector<int>;
const std::vector<HostOfRank> kLayouts = {
    {0, 0, 1, 1},                    // 2 x 2
    {0, 1, 0, 1, 0, 1},              // 2 x 3, hosts take turns
    {0, 0, 1, 1, 2, 2},              // 3 x 2
    {0, 0, 0, 0, 0, 1, 1, 1, 1, 1},  // 2 x 5
};

// Ranks of several hosts. The ranks of a host share memory with a segment, unless the
// host is `without`. TCP links, encrypted ones, join ranks of different hosts.
World JoinHosts(const HostOfRank& hosts, int without = -1, double timeout = 20) {
  const int size = static_cast<int>(hosts.size());
  std::vector<std::unique_ptr<Doorbell>> bells(hosts.size());
  for (int host = 0; host <= hosts.back(); ++host) {
    const auto ranks = static_cast<int>(std::count(hosts.begin(), hosts.end(), host));
    auto made = MakeDoorbells(ranks, 4096, host == without ? 0 : kRailTile);
    auto next = made.begin();
    for (int r = 0; r < size; ++r)
      if (hosts[r] == host) bells[r] = std::move(*next++);
  }
  std::vector<std::vector<std::unique_ptr<Link>>> links(hosts.size());
  for (auto& of_rank : links) of_rank.resize(hosts.size());
  for (int r = 0; r < size; ++r)
    for (int peer = 0; peer < size; ++peer) {
      if (peer != r && hosts[peer] == hosts[r])
        links[r][peer] =
            std::move(MakeRingLink(bells[r].get(), bells[peer]->index()).value());
      if (peer <= r || hosts[peer] == hosts[r]) continue;
      Ends ends = SocketEnds(1, UnixPair, true);
      links[r][peer] = std::move(ends.links[0]);
      links[peer][r] = std::move(ends.links[1]);
    }
  World world({0});
  world.ranks.clear();
  CommunicatorOptions o;
  o.collective_timeout = timeout;
  o.algorithm = without < 0 ? kHierarchicalShared : "";
  for (int r = 0; r < size; ++r) o.world_ranks.push_back(r);
  for (int r = 0; r < size; ++r) {
    o.topology = {r, size, hosts};
    std::unique_ptr<SharedSegment> segment;
    if (hosts[r] != without) segment = std::make_unique<SharedSegment>(bells[r].get());
    world.ranks.push_back(std::make_shared<Communicator>(
        o, std::move(links[r]), std::move(bells[r]), std::move(segment)));
  }
  return world;
}

// Returns how often the ranks have used each algorithm for an allreduce.
std::map<std::string, uint64_t> AlgorithmsUsed(const Communicator& c) {
  const auto algorithms = c.log().stats().at("allreduce").algorithms;
  return {algorithms.begin(), algorithms.end()};
}

// The tiles do inside the hosts what the direct algorithm does, step by step.
TEST(ThePhasesTogetherAreAnAllreduce) {
  for (const HostOfRank& hosts : kLayouts)
    for (const uint64_t n : {0, 1, 3, 29, 1'000'003}) {
      const int size = static_cast<int>(hosts.size());
      std::vector<Schedule> schedules;
      for (int r = 0; r < size; ++r) {
        const Topology topology{r, size, hosts, true};
        const Schedule between =
            collective::BetweenHosts(collective::HierarchicalAllreduce(
                                         {Collective::kAllreduce, 0, {n}}, topology),
                                     topology);
        collective::Group local;
        for (int peer = 0; peer < size; ++peer) {
          if (hosts[peer] != hosts[r]) continue;
          if (peer == r) local.index = local.size();
          local.ranks.push_back(peer);
        }
        const auto parts = collective::Blocks::Even({0, n}, local.size());
        collective::ScheduleBuilder before, after;
        collective::AddDirectReduceScatter(&before, local, parts, false,
                                           collective::OutAt(parts.At(local.index)));
        after.Move({0, n}, {Region::kOut, 0, n});
        collective::AddDirectAllgather(&after, local, parts);
        Schedule all = before.Take();
        for (const Schedule& phase : {between, after.Take()})
          all.steps.insert(all.steps.end(), phase.steps.begin(), phase.steps.end());
        schedules.push_back(std::move(all));
      }
      const std::vector<Problem> problems(hosts.size(),
                                          {Collective::kAllreduce, 0, {n}});
      const Report report = VerifySchedules(problems, schedules);
      CHECK_EQ(report.error, "");
      CHECK(report.ok);
    }
}

struct Variant {
  ReduceOp op = ReduceOp::kSum;
  int wire = -1;
  double scale = 1;
  bool in_place = true;
};

// The values are small integers, so that sums in any order, and in bf16, are equal.
void CheckOnRails(Communicator& c, size_t n, const Variant& o) {
  const auto value = [](int rank, size_t i) {
    return static_cast<float>((i * 7 + static_cast<size_t>(rank) * 3) % 13);
  };
  std::vector<float> in(n), out(n, -1.0f);
  for (size_t i = 0; i < n; ++i) in[i] = value(c.rank(), i);
  Call call = AllreduceOf(&in, o.op);
  call.tensors = {Floats(&in, o.in_place ? &in : &out)};
  call.wire = o.wire;
  call.prescale = o.scale;
  call.postscale = 4 / o.scale;
  CHECK(c.Run(call).ok());
  size_t wrong = 0;
  for (size_t i = 0; i < n; ++i) {
    float want = 0;
    for (int r = 0; r < c.size(); ++r)
      want = o.op == ReduceOp::kMax ? std::max(want, value(r, i)) : want + value(r, i);
    if (o.op == ReduceOp::kAverage) want /= static_cast<float>(c.size());
    const float got = o.in_place ? in[i] : out[i];
    wrong += std::abs(got - 4 * want) > 1e-5f * want;
    wrong += !o.in_place && in[i] != value(c.rank(), i);
  }
  CHECK_EQ(wrong, size_t{0});
}

TEST(AllreduceOverTheSegmentsOfHosts) {
  for (const HostOfRank& hosts : kLayouts) {
    World world = JoinHosts(hosts);
    world.Each([&](Communicator& c) {
      for (const size_t n : {1, 3, 31, 4097, 40001})
        for (const bool in_place : {true, false}) {
          CheckOnRails(c, n, {.in_place = in_place});
          CheckOnRails(c, n, {.op = ReduceOp::kAverage, .in_place = in_place});
          CheckOnRails(c, n, {.op = ReduceOp::kMax, .in_place = in_place});
          CheckOnRails(c, n,
                       {.wire = static_cast<int>(DType::kBF16),
                        .scale = 2,
                        .in_place = in_place});
        }
    });
    CHECK_EQ(AlgorithmsUsed(*world.ranks[0]).size(), size_t{1});
    CHECK_EQ(AlgorithmsUsed(*world.ranks[0]).count(std::string(kHierarchicalShared)),
             size_t{1});
  }
}

TEST(AllRanksOfAllHostsEndWithTheSameBits) {
  const HostOfRank hosts = kLayouts[1];
  World world = JoinHosts(hosts);
  for (const int wire : {-1, static_cast<int>(DType::kF16)}) {
    std::vector<std::vector<float>> results(hosts.size(), std::vector<float>(50001));
    world.Each([&](Communicator& c) {
      std::mt19937 random(static_cast<unsigned>(c.rank()));
      std::uniform_real_distribution<float> any(-1, 1);
      std::vector<float>& data = results[static_cast<size_t>(c.rank())];
      for (float& x : data) x = any(random);
      Call call = AllreduceOf(&data, ReduceOp::kAverage);
      call.wire = wire;
      CHECK(c.Run(call).ok());
    });
    for (const auto& data : results)
      CHECK(std::memcmp(data.data(), results[0].data(), 4 * data.size()) == 0);
  }
}

// All ranks must choose the same algorithm, although only the ranks of host 1 know that
// their host has no segment.
TEST(OneHostWithoutASegmentMakesAllHostsUseLinks) {
  World world = JoinHosts({0, 0, 1, 1}, 1);
  world.Each([&](Communicator& c) {
    for (const size_t n : {31, 4097}) CheckOnRails(c, n, {});
    CHECK_EQ(AlgorithmsUsed(c).count(std::string(kHierarchicalShared)), size_t{0});
  });
}

// Runs the first phase on a host of ranks 4 and 7, as rank 4. `act` acts as rank 7.
Status RunBesideNeighbour(
    const std::function<void(std::unique_ptr<SharedSegment>*)>& act,
    std::vector<int>* stalled) {
  Ends ends = ShmEnds(4096, kRailTile);
  auto theirs = std::make_unique<SharedSegment>(ends.bells[1].get());
  Endpoints endpoints;
  endpoints.timeout = 0.2;
  endpoints.stall_after = 0.05;
  endpoints.on_stall = [&](double, const std::vector<int>& peers, bool*) {
    *stalled = peers;
    return OkStatus();
  };
  endpoints.host = std::make_unique<HostEndpoints>();
  endpoints.host->ranks = {4, 7};
  endpoints.host->near = std::make_unique<Endpoints>();
  endpoints.host->near->segment = std::make_unique<SharedSegment>(ends.bells[0].get());
  act(&theirs);
  std::vector<float> data(1000, 1.0f);
  Spans all;
  all.Add(data.data(), data.size() * sizeof(float));
  const std::atomic<bool> aborted{false};
  Waiter waiter(ends.bells[0].get(), &aborted, 0, false);
  return ReduceOnRails({}, {Collective::kAllreduce, 0, {data.size()}}, {&all, &all, {}},
                       {}, {}, endpoints, &waiter);
}

TEST(ALateNeighbourIsNamedByItsRank) {
  std::vector<int> stalled;
  const Status status = RunBesideNeighbour([](auto*) {}, &stalled);
  CHECK(status.code() == Code::kDeadlineExceeded);
  CHECK_EQ(status.rank(), 7);
  CHECK(stalled == std::vector{7});
}

TEST(ALostNeighbourIsNamedByItsRank) {
  std::vector<int> stalled;
  const Status status =
      RunBesideNeighbour([](auto* theirs) { theirs->reset(); }, &stalled);
  CHECK(status.code() == Code::kUnavailable);
  CHECK_EQ(status.rank(), 7);
  CHECK(stalled.empty());
}

}  // namespace
}  // namespace ringjax
