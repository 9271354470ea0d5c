// The teardown barrier: announcements, and how long a rank waits for which ranks.
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <thread>

#include "check.h"
#include "heartbeats.h"
#include "local_world.h"

namespace ringjax {
namespace {

constexpr double kLong = 20;  // seconds, longer than any test here

TEST(RanksWaitForEachOtherAtTheTeardownBarrier) {
  World world({0, 0, 0});
  const auto beats = JoinHeartbeats(world.ranks);
  std::vector<char> parted(3, 0);
  std::vector<std::thread> threads;
  for (size_t r : {0, 1})
    threads.emplace_back(
        [&, r] { parted[r] = world.ranks[r]->heartbeat().AwaitTeardown(kLong); });
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  CHECK(!parted[0] && !parted[1]);  // rank 2 has not announced
  parted[2] = world.ranks[2]->heartbeat().AwaitTeardown(kLong);
  for (auto& thread : threads) thread.join();
  CHECK(parted[0] && parted[1] && parted[2]);
  const TeardownAnnouncements& zero = beats[0]->teardown_announcements();
  // No rank has announced anything for another communicator or epoch.
  CHECK(zero.NotReady(7, 0, {0, 1, 2}) == (std::vector<int>{1, 2}));
  CHECK(zero.NotReady(0, 1, {0, 2}) == std::vector<int>{2});
  CHECK(zero.NotReady(0, 0, {0, 1, 2}).empty());
}

TEST(NoRankWaitsForALostRank) {
  World world({0, 0, 0});
  auto beats = JoinHeartbeats(world.ranks);
  beats[1]->Leave();
  beats[2]->Fail("has failed, and is still here");
  CHECK(!world.ranks[0]->heartbeat().AwaitTeardown(0.02));
  beats[2]->Stop();
  CHECK(world.ranks[0]->heartbeat().AwaitTeardown(kLong));
}

TEST(TheWaitForAPeerWithoutATeardownEnds) {
  World world({0, 0});
  const auto beats = JoinHeartbeats(world.ranks);
  CHECK(!world.ranks[0]->heartbeat().AwaitTeardown(0.02));
  beats[0]->Stop();
  CHECK(world.ranks[0]->heartbeat().AwaitTeardown(
      kLong));  // nobody is there to agree with
}

// A child has the heartbeat of its parent, but not the thread of the heartbeat.
TEST(AForkedProcessMayStopAHeartbeatAndThatOfTheParentLives) {
  World world({0, 0});
  const auto beats = JoinHeartbeats(world.ranks);
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    beats[0]->Stop();
    _exit(0);
  }
  int status = -1;
  CHECK_EQ(waitpid(child, &status, 0), child);
  CHECK_EQ(status, 0);
  beats[1]->Leave();
  CHECK(Until([&] { return beats[0]->left() == std::vector<int>{1}; }));
  CHECK(beats[0]->lost().empty());
}

TEST(WithoutAHeartbeatTheBarrierDoesNotWait) {
  World world({0, 0});
  CHECK(world.ranks[0]->heartbeat().AwaitTeardown(kLong));
}

}  // namespace
}  // namespace ringjax
