// Letting go: who has said so, and how long a communicator waits for whom.
#include <sys/socket.h>

#include <chrono>
#include <thread>

#include "check.h"
#include "engine/heartbeat/heartbeat.h"
#include "local_world.h"

namespace ringjax {
namespace {

constexpr double kLong = 20;  // seconds, which nothing here takes

std::vector<std::shared_ptr<Heartbeat>> Beating(const World& world) {
  std::vector<std::vector<Heartbeat::Peer>> peers(world.ranks.size());
  const int size = static_cast<int>(world.ranks.size());
  for (int a = 0; a < size; ++a)
    for (int b = a + 1; b < size; ++b) {
      int pair[2];
      CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair), 0);
      peers[static_cast<size_t>(a)].push_back({b, pair[0]});
      peers[static_cast<size_t>(b)].push_back({a, pair[1]});
    }
  std::vector<std::shared_ptr<Heartbeat>> all;
  for (int r = 0; r < size; ++r) {
    const auto at = static_cast<size_t>(r);
    all.push_back(
        std::make_shared<Heartbeat>(r, peers[at], 0.1, kLong, MakeBell(), nullptr));
    all.back()->Watch(world.ranks[at]);
  }
  return all;
}

TEST(ThoseWhoPartWaitForEachOther) {
  World world({0, 0, 0});
  const auto beats = Beating(world);
  std::vector<char> parted(3, 0);
  std::vector<std::thread> threads;
  for (size_t r : {0, 1})
    threads.emplace_back(
        [&, r] { parted[r] = world.ranks[r]->heartbeat().AwaitTeardown(kLong); });
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  CHECK(!parted[0] && !parted[1]);  // rank 2 has yet to come
  parted[2] = world.ranks[2]->heartbeat().AwaitTeardown(kLong);
  for (auto& thread : threads) thread.join();
  CHECK(parted[0] && parted[1] && parted[2]);
  // Of another communicator, or epoch, nobody has said anything.
  CHECK(beats[0]->NotReady(7, 0, {0, 1, 2}) == (std::vector<int>{1, 2}));
  CHECK(beats[0]->NotReady(0, 1, {0, 2}) == std::vector<int>{2});
  CHECK(beats[0]->NotReady(0, 0, {0, 1, 2}).empty());
}

TEST(NobodyWaitsForARankThatIsGone) {
  World world({0, 0, 0});
  auto beats = Beating(world);
  beats[1]->Leave();
  beats[2]->Fail("has failed, and is still here");
  CHECK(!world.ranks[0]->heartbeat().AwaitTeardown(0.02));
  beats[2]->Stop();
  CHECK(world.ranks[0]->heartbeat().AwaitTeardown(kLong));
}

TEST(AWaitForAPeerThatStaysEnds) {
  World world({0, 0});
  const auto beats = Beating(world);
  CHECK(!world.ranks[0]->heartbeat().AwaitTeardown(0.02));
  beats[0]->Stop();
  CHECK(world.ranks[0]->heartbeat().AwaitTeardown(
      kLong));  // nobody is there to agree with
}

TEST(WithoutAHeartbeatThereIsNobodyToPartFrom) {
  World world({0, 0});
  CHECK(world.ranks[0]->heartbeat().AwaitTeardown(kLong));
}

}  // namespace
}  // namespace ringjax
