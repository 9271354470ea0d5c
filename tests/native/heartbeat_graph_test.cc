// Heartbeats of many ranks that are connected with few of them: each rank learns each
// loss with its reason, and reaches every other rank.
#include <sys/socket.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "check.h"
#include "heartbeats.h"

namespace ringjax {
namespace {

// The neighbours of a rank on one host, see links/standing.py.
std::set<int> Neighbours(int rank, int size) {
  std::set<int> found;
  for (int distance = 1; distance < size; distance *= 2) {
    found.insert((rank + distance) % size);
    found.insert((rank - distance + size) % size);
  }
  found.erase(rank);
  return found;
}

struct Graph {
  explicit Graph(int size, double timeout = 60, bool elastic = false)
      : heartbeats(size) {
    std::vector<std::vector<Heartbeat::Peer>> peers(size);
    for (int a = 0; a < size; ++a)
      for (const int b : Neighbours(a, size)) {
        if (b < a) continue;
        int pair[2];
        CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair), 0);
        peers[a].push_back({b, pair[0]});
        peers[b].push_back({a, pair[1]});
      }
    for (int r = 0; r < size; ++r)
      heartbeats[r] =
          std::make_shared<Heartbeat>(r, Nodes(size), peers[r], 0.05, timeout,
                                      MakeEventFd(), elastic ? MakeEventFd() : nullptr);
  }

  // Whether all ranks but `gone` know that these ranks are lost, and no others.
  bool AllHaveLost(std::set<int> lost, const std::set<int>& gone) const {
    for (int r = 0; r < static_cast<int>(heartbeats.size()); ++r) {
      if (gone.contains(r)) continue;
      std::set<int> known;
      for (const auto& [rank, why] : heartbeats[r]->lost()) known.insert(rank);
      if (known != lost) return false;
    }
    return true;
  }

  std::vector<std::shared_ptr<Heartbeat>> heartbeats;
};

std::string ReasonOf(const Heartbeat& heartbeat, int rank) {
  for (const auto& [lost, why] : heartbeat.lost())
    if (lost == rank) return why;
  return "";
}

TEST(AllRanksLearnALossFromItsNeighbours) {
  for (const int size : {2, 3, 6, 7, 23, 40}) {
    Graph graph(size);
    graph.heartbeats[size / 2]->Stop();
    CHECK(Until([&] { return graph.AllHaveLost({size / 2}, {size / 2}); }));
    for (int r = 0; r < size; ++r)
      if (r != size / 2)
        CHECK_EQ(ReasonOf(*graph.heartbeats[r], size / 2),
                 "closed its connection (the process ended)");
  }
}

TEST(AllRanksLearnWhyARankFails) {
  Graph graph(23);
  graph.heartbeats[4]->Fail("the disk is full");
  CHECK(Until([&] { return graph.AllHaveLost({4}, {4}); }));
  for (int r = 0; r < 23; ++r)
    if (r != 4) CHECK_EQ(ReasonOf(*graph.heartbeats[r], 4), "failed: the disk is full");
  graph.heartbeats[4]->Stop();  // the reason is the first one that was known
  graph.heartbeats[9]->Fail("a link of rank 20 broke", 20);
  CHECK(Until([&] { return graph.AllHaveLost({4, 20}, {4, 9}); }));
  CHECK_EQ(ReasonOf(*graph.heartbeats[0], 20), "a link of rank 20 broke");
}

TEST(ManyLossesAtOnceReachAllThatAreLeft) {
  std::mt19937 random(41);
  for (int round = 0; round < 5; ++round) {
    Graph graph(48);
    std::set<int> gone;
    while (gone.size() < 5) gone.insert(static_cast<int>(random() % 48));
    for (int r = round; r < round + 8; ++r) gone.insert(r);  // a whole host
    for (const int r : gone) graph.heartbeats[r]->Stop();
    CHECK(Until([&] { return graph.AllHaveLost(gone, gone); }));
  }
}

// The coordinator of an elastic job weighs what ranks have noticed themselves.
TEST(InAnElasticJobOnlyNeighboursReportALoss) {
  Graph graph(23, 60, true);
  graph.heartbeats[11]->Stop();
  const std::set<int> neighbours = Neighbours(11, 23);
  const auto losses = [&](int r) { return graph.heartbeats[r]->lost().size(); };
  CHECK(Until([&] {
    return std::all_of(neighbours.begin(), neighbours.end(),
                       [&](int r) { return losses(r) == 1; });
  }));
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  for (int r = 0; r < 23; ++r)
    CHECK_EQ(losses(r), r != 11 && neighbours.contains(r) ? 1u : 0u);
}

TEST(MessagesReachEveryRankOverOthers) {
  constexpr int kSize = 37;
  Graph graph(kSize);
  std::vector<int> others;
  for (int r = 1; r < kSize; ++r) others.push_back(r);
  ProbeSender& sender = graph.heartbeats[0]->probe_sender();
  sender.SendProbes({0, 7, false, others, "allreduce 'x'"});
  CHECK(Until([&] { return AllAnswered(sender.ProbeReplies(0, others)); }));
  for (const ProbeReply& reply : sender.ProbeReplies(0, others)) {
    CHECK_EQ(reply.host, "node-" + std::to_string(reply.rank));
    CHECK(reply.asked && reply.answered && !reply.entered);
  }
  for (int r = 1; r < kSize; ++r) graph.heartbeats[r]->clock_offsets().RequestClock(3);
  for (int r = 1; r < kSize; ++r) {
    std::vector<ClockReading> readings;
    CHECK(Until([&] {
      for (const auto& each : graph.heartbeats[r]->clock_offsets().TakeReadings())
        readings.push_back(each);
      return readings.size() == 3;
    }));
    // All ranks are threads of this process, so their clocks are equal.
    for (const ClockReading& each : readings)
      CHECK(each.rank == 0 && std::abs(each.ahead) <= each.trip / 2);
  }
}

TEST(AMessageGoesRoundALostRank) {
  constexpr int kSize = 40;
  Graph graph(kSize);
  std::set<int> gone = {2, 4, 8, 16, 32};  // half of the neighbours of rank 0
  for (const int r : gone) graph.heartbeats[r]->Stop();
  CHECK(Until([&] { return graph.AllHaveLost(gone, gone); }));
  std::vector<int> others;
  for (int r = 1; r < kSize; ++r)
    if (!gone.contains(r)) others.push_back(r);
  ProbeSender& sender = graph.heartbeats[0]->probe_sender();
  size_t answers = 0;
  sender.SendProbes({0, 7, false, others, "allreduce 'x'"});
  CHECK(Until([&] {
    answers = 0;
    for (const ProbeReply& reply : sender.ProbeReplies(0, others))
      answers += reply.answered;
    return answers + 6 >= others.size();  // some ways end at a lost rank
  }));
}

TEST(TheTeardownBarrierIsForAllRanks) {
  constexpr int kSize = 19;
  Graph graph(kSize);
  std::vector<int> all;
  for (int r = 0; r < kSize; ++r) all.push_back(r);
  const auto barrier = [&](int r) -> TeardownAnnouncements& {
    return graph.heartbeats[r]->teardown_announcements();
  };
  CHECK_EQ(barrier(0).NotReady(5, 1, all).size(), kSize - 1u);
  for (int r = 0; r < kSize - 1; ++r) barrier(r).AnnounceTeardown(5, 1);
  for (int r = 0; r < kSize - 1; ++r)
    CHECK(Until(
        [&] { return barrier(r).NotReady(5, 1, all) == std::vector<int>{kSize - 1}; }));
  graph.heartbeats[kSize - 1]->Stop();  // an ended process holds no memory
  for (int r = 0; r < kSize - 1; ++r)
    CHECK(Until([&] { return barrier(r).NotReady(5, 1, all).empty(); }));
}

}  // namespace
}  // namespace ringjax
