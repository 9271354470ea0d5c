// Beats between ranks of one host, in the memory that they share.
#include <sys/socket.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "check.h"
#include "heartbeats.h"
#include "transport/descriptor.h"
#include "transport/ring_buffer.h"

namespace ringjax {
namespace {

using Ranks = std::vector<std::shared_ptr<Communicator>>;

// The heartbeat of rank 0 of two, and the other end of its connection.
struct Half {
  explicit Half(double timeout) : ranks(JoinRanks({0, 0}, {}, 1 << 12, 0)) {
    int pair[2];
    CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair), 0);
    peer = std::make_unique<Descriptor>(pair[1]);
    heartbeat = std::make_shared<Heartbeat>(0, Nodes(2),
                                            std::vector<Heartbeat::Peer>{{1, pair[0]}},
                                            0.02, timeout, MakeEventFd());
    heartbeat->Watch(ranks[0], {0, 1});
  }

  HostWords& words(int rank) {
    return ranks[0]->heartbeat().doorbell().memory()->words(rank);
  }
  // Waits for `beats` beats of rank 0 in the memory.
  void AwaitBeats(uint64_t beats) {
    const uint64_t before = LoadShared(words(0).beats);
    CHECK(Until([&] { return LoadShared(words(0).beats) >= before + beats; }));
  }
  // Returns the bytes that have arrived over the socket.
  size_t Received() {
    std::string bytes(1 << 16, ' ');
    const ssize_t n = recv(peer->get(), bytes.data(), bytes.size(), MSG_DONTWAIT);
    return n < 0 ? 0 : static_cast<size_t>(n);
  }

  Ranks ranks;
  std::unique_ptr<Descriptor> peer;
  std::shared_ptr<Heartbeat> heartbeat;
};

TEST(ARankThatReadsBeatsInMemoryGetsNoneOverItsSocket) {
  Half half(60);
  CHECK(Until([&] { return half.Received() > 0; }));  // it does not read yet
  StoreShared(half.words(1).reads_beats, uint32_t{1});
  half.AwaitBeats(2);
  half.Received();
  half.AwaitBeats(5);
  CHECK_EQ(half.Received(), 0u);
  half.heartbeat->Fail("is out of memory");
  CHECK(Until([&] { return half.Received() > 0; }));
}

TEST(ARankThatBeatsInMemoryIsAlive) {
  constexpr double kTimeout = 0.5;
  Half half(kTimeout);
  double slowest = 0;
  for (const double end = SecondsNow() + 3 * kTimeout; SecondsNow() < end;) {
    const double began = SecondsNow();
    StoreShared(half.words(1).beats, half.words(1).beats + 1);
    half.AwaitBeats(1);
    slowest = std::max(slowest, SecondsNow() - began);
  }
  // On a machine that is busy for so long, the rank was silent.
  if (slowest < kTimeout / 4) CHECK(half.heartbeat->lost().empty());
  CHECK(Until([&] { return !half.heartbeat->lost().empty(); }));
  CHECK(half.heartbeat->lost()[0].second.starts_with("has been silent"));
}

TEST(ABeatTellsTheCallsThatARankHasEntered) {
  const auto memory = HostMemory::Local({3, 1 << 12, 0});
  const std::vector<int> ranks{1, 4, 5};
  SharedBeats one(memory, 0, ranks), five(memory, 2, ranks);
  SharedBeats::Entered entered = {};
  CHECK(one.Reads(5) && !one.Reads(4) && !one.Reads(2) && !one.Reads(6));
  CHECK(!one.HasBeat(5, &entered));
  five.Beat({7, 9});
  CHECK(one.HasBeat(5, &entered));
  CHECK(entered == (SharedBeats::Entered{7, 9}));
  CHECK(!one.HasBeat(5, &entered) && !one.HasBeat(3, &entered));
}

}  // namespace
}  // namespace ringjax
