// Threads as ranks over links within the process: collectives, disagreement, loss,
// overlap. Threads run the code of processes, and sanitizers can check threads.
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <ctime>
#include <random>
#include <thread>

#include "check.h"
#include "collective/table.h"
#include "engine/communicator/overlap.h"
#include "engine/heartbeat/heartbeat.h"
#include "heartbeats.h"
#include "link_ends.h"
#include "local_world.h"

namespace ringjax {
namespace {

void CheckSum(World* world, size_t n, ReduceOp op) {
  const float size = static_cast<float>(world->ranks.size());
  world->Each([&](Communicator& c) {
    std::vector<float> data(n);
    for (size_t i = 0; i < n; ++i)
      data[i] = static_cast<float>(i % 97) + static_cast<float>(c.rank());
    const Status status = c.Run(AllreduceOf(&data, op));
    CHECK(status.ok());
    for (size_t i = 0; i < n; ++i) {
      const float sum = static_cast<float>(i % 97) * size + size * (size - 1) / 2;
      const float want = op == ReduceOp::kAverage ? sum / size : sum;
      if (std::abs(data[i] - want) > 1e-3f) {
        CHECK(data[i] == want);
        break;
      }
    }
  });
}

TEST(AllreduceEveryAlgorithmAndSize) {
  for (const Algorithm& a : Algorithms()) {
    if (a.op != Collective::kAllreduce) continue;
    for (const std::vector<int>& hosts :
         {std::vector<int>{0}, {0, 0}, {0, 0, 0}, {0, 0, 1, 1}, {0, 1, 2, 2, 2}}) {
      const bool segment = hosts.size() > 1 && hosts.back() == 0;
      if (!a.applies({0, static_cast<int>(hosts.size()), hosts, segment})) continue;
      World world(hosts, "allreduce:" + std::string(a.name));
      for (size_t n : {1, 2, 5, 1000, 70001}) CheckSum(&world, n, ReduceOp::kSum);
      CheckSum(&world, 333, ReduceOp::kAverage);
    }
  }
}

TEST(ManyCallsBackToBack) {
  World world({0, 0, 0});
  world.Each([](Communicator& c) {
    std::mt19937 random(7);
    for (int i = 0; i < 300; ++i) {
      std::vector<float> data(random() % 3000, 1.0f);
      CHECK(c.Run(AllreduceOf(&data)).ok());
      for (float x : data) CHECK_EQ(x, 3.0f);
    }
  });
}

TEST(AMismatchFailsOnAllRanksAndLeavesTheCommunicatorUsable) {
  World world({0, 0, 0, 0, 0});
  std::vector<std::string> messages(5);
  world.Each([&](Communicator& c) {
    std::vector<float> data(c.rank() == 3 ? 6 : 4, 1.0f);
    const Status status = c.Run(AllreduceOf(&data));
    CHECK(status.code() == Code::kMismatch);
    CHECK_EQ(status.rank(), 3);
    messages[c.rank()] = status.message();
    for (float x : data) CHECK_EQ(x, 1.0f);  // nothing was exchanged
    std::vector<float> next(8, 1.0f);
    CHECK(c.Run(AllreduceOf(&next)).ok());
    CHECK_EQ(next[0], 5.0f);
  });
  for (const auto& m : messages) {
    CHECK_EQ(m, messages[0]);
    CHECK(m.find("rank 3 sent f32[6]") != m.npos);
    CHECK(m.find("rank 0 sent f32[4]") != m.npos);
  }
}

TEST(MismatchedKindsOfCallsAreNamed) {
  World world({0, 0});
  world.Each([](Communicator& c) {
    std::vector<float> data(4, 1.0f);
    Call call = AllreduceOf(&data);
    if (c.rank() == 1) call.op = Collective::kBroadcast;
    const Status status = c.Run(call);
    CHECK(status.code() == Code::kMismatch);
    CHECK(status.message().find("broadcast") != std::string::npos);
    CHECK(status.message().find("allreduce") != std::string::npos);
  });
}

TEST(AlltoallWithSplitsThatDoNotMatch) {
  World world({0, 0, 0});
  world.Each([](Communicator& c) {
    std::vector<float> in(6, static_cast<float>(c.rank())), out(6, -1.0f);
    Call call;
    call.op = Collective::kAlltoall;
    call.name = "a";
    call.tensors.push_back(Floats(&in, &out));
    call.rows = {2, 2, 2, 2, 2, 2};
    CHECK(c.Run(call).ok());
    for (int i = 0; i < 6; ++i) CHECK_EQ(out[i], static_cast<float>(i / 2));
    if (c.rank() == 1) call.rows = {1, 3, 2, 2, 2, 2};
    CHECK(c.Run(call).code() == Code::kMismatch);
    call.rows = {2, 2, 2, 2, 2, 2};
    CHECK(c.Run(call).ok());
  });
}

TEST(ACallThatOneRankNeverMakesTimesOut) {
  World world({0, 0, 0}, "", 4096, 1.5);
  world.Each([](Communicator& c) {
    if (c.rank() == 2) return;
    std::vector<float> data(4, 1.0f);
    const Status status = c.Run(AllreduceOf(&data));
    CHECK(status.code() == Code::kDeadlineExceeded);
    CHECK(c.aborted());
    CHECK(!c.Run(AllreduceOf(&data)).ok());
  });
}

TEST(AbortWakesAWaitingCall) {
  World world({0, 0});
  std::thread waiting([&] {
    std::vector<float> data(4, 1.0f);
    const Status status = world.ranks[0]->Run(AllreduceOf(&data));
    CHECK(status.code() == Code::kUnavailable);
    CHECK(status.message().find("rank 1 is gone") != std::string::npos);
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  world.ranks[0]->Abort(Status(Code::kUnavailable, "rank 1 is gone", 1));
  waiting.join();
}

TEST(OverlapKeepsOrderWithDirectCalls) {
  World world({0, 0, 0});
  world.Each([&](Communicator& c) {
    Overlap overlap(world.ranks[c.rank()]);
    for (int step = 0; step < 20; ++step) {
      std::vector<std::vector<float>> buckets(4, std::vector<float>(500, 1.0f));
      for (int k = 0; k < 4; ++k)
        CHECK(overlap.Start(AllreduceOf(&buckets[k]), k, 4 * 2048).ok());
      std::vector<float> alone(10, 2.0f);
      CHECK(c.Run(AllreduceOf(&alone)).ok());
      CHECK_EQ(alone[9], 6.0f);
      for (int k = 0; k < 4; ++k) {
        CHECK(overlap.Done(AllreduceOf(&buckets[k]), k).ok());
        CHECK_EQ(buckets[k][499], 3.0f);
      }
    }
  });
}

TEST(AStepLeftHalfDoneEndsTheCommunicator) {
  World world({0});
  Overlap overlap(world.ranks[0]);
  std::vector<float> data(8, 1.0f);
  CHECK(!overlap.Done(AllreduceOf(&data), 0).ok());
  CHECK(overlap.Start(AllreduceOf(&data), 0, 128).ok());
  overlap.Begin(1);
  CHECK(overlap.Start(AllreduceOf(&data), 1, 128).ok());
  CHECK(!overlap.Done(AllreduceOf(&data), 1).ok());
  CHECK(world.ranks[0]->aborted());
}

TEST(HeartbeatNamesTheRankThatDied) {
  World world({0, 0});
  int pair[2];
  CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair), 0);
  auto zero = std::make_shared<Heartbeat>(
      0, Nodes(3), std::vector<Heartbeat::Peer>{{1, pair[0]}}, 0.1, 5.0, MakeEventFd());
  zero->Watch(world.ranks[0]);
  std::thread waiting([&] {
    std::vector<float> data(4, 1.0f);
    const Status status = world.ranks[0]->Run(AllreduceOf(&data));
    CHECK(status.code() == Code::kUnavailable);
    CHECK_EQ(status.rank(), 1);
  });
  close(pair[1]);
  waiting.join();
  CHECK_EQ(zero->lost().size(), 1u);
}

TEST(HeartbeatPassesOnTheReasonAndTheCulprit) {
  World world({0, 0, 0});
  int pair[2], other[2];
  CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair), 0);
  CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, other), 0);
  auto zero = std::make_shared<Heartbeat>(
      0, Nodes(3), std::vector<Heartbeat::Peer>{{1, pair[0]}, {2, other[0]}}, 0.1, 5.0,
      MakeEventFd());
  auto one = std::make_shared<Heartbeat>(
      1, Nodes(3), std::vector<Heartbeat::Peer>{{0, pair[1]}}, 0.1, 5.0, MakeEventFd());
  zero->Watch(world.ranks[0]);
  one->Fail("rank 2 closed its connection", 2);
  one->Stop();
  std::vector<float> data(4, 1.0f);
  const Status status = world.ranks[0]->Run(AllreduceOf(&data));
  CHECK(status.code() == Code::kUnavailable);
  for (int i = 0; i < 6000 && zero->lost().size() < 2; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  CHECK_EQ(zero->lost()[0].first, 2);
  close(other[1]);
}

TEST(AHeartbeatDetectsManyLossesAtOnce) {
  std::vector<Heartbeat::Peer> peers;
  std::vector<int> ends;
  for (int rank = 1; rank <= 150; ++rank) {
    int pair[2];
    CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair), 0);
    peers.push_back({rank, pair[0]});
    ends.push_back(pair[1]);
  }
  const auto zero =
      std::make_shared<Heartbeat>(0, Nodes(151), peers, 10.0, 60.0, MakeEventFd());
  for (const int fd : ends) close(fd);
  for (int i = 0; i < 6000 && zero->lost().size() < ends.size(); ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  CHECK_EQ(zero->lost().size(), ends.size());
}

// A forked child has copies of all sockets for a moment. dup makes such a copy here.
TEST(AHeartbeatSleepsWhileAForkedChildHasALostSocket) {
  int pair[2];
  CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair), 0);
  const int copy = dup(pair[0]);
  const auto zero = std::make_shared<Heartbeat>(
      0, Nodes(3), std::vector<Heartbeat::Peer>{{1, pair[0]}}, 10.0, 60.0,
      MakeEventFd());
  close(pair[1]);
  for (int i = 0; i < 6000 && zero->lost().empty(); ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  CHECK_EQ(zero->lost().size(), 1u);
  const auto before = std::clock();
  for (int i = 0; i < 50 && std::clock() - before < CLOCKS_PER_SEC / 10; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  CHECK(std::clock() - before < CLOCKS_PER_SEC / 10);
  close(copy);
}

// Runs in a process that stops itself by SIGSTOP. Returns 0, the exit status, if its
// heartbeat blames no peer for the pause after SIGCONT.
int StandStill(int socket) {
  Heartbeat heartbeat(0, Nodes(2), {{1, socket}}, 0.05, 1.0, MakeEventFd(), nullptr,
                      nullptr);
  raise(SIGSTOP);
  std::this_thread::sleep_for(std::chrono::milliseconds(200));  // four beats
  return heartbeat.lost().empty() ? 0 : 1;
}

TEST(AHeartbeatOfAStoppedProcessBlamesNoPeer) {
  int pair[2], status = -1;
  CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair), 0);
  const pid_t child = fork();
  if (child == 0) _exit(StandStill(pair[0]));
  close(pair[0]);
  CHECK_EQ(waitpid(child, &status, WUNTRACED), child);
  CHECK(WIFSTOPPED(status));
  std::this_thread::sleep_for(std::chrono::milliseconds(1500));
  kill(child, SIGCONT);
  CHECK_EQ(waitpid(child, &status, 0), child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  close(pair[1]);
}

// Reads a stream up to its end.
std::string ReadAll(int fd) {
  std::string bytes;
  char buffer[4096];
  for (ssize_t n; (n = read(fd, buffer, sizeof buffer)) > 0;)
    bytes.append(buffer, static_cast<size_t>(n));
  return bytes;
}

TEST(AStoppedPeerMissesNoByteOfItsHeartbeat) {
  const auto [ours, theirs] = Loopback();
  const int little = 4096;
  setsockopt(ours, SOL_SOCKET, SO_SNDBUF, &little, sizeof little);
  setsockopt(theirs, SOL_SOCKET, SO_RCVBUF, &little, sizeof little);
  auto heartbeat = std::make_shared<Heartbeat>(
      0, Nodes(3), std::vector<Heartbeat::Peer>{{1, ours}}, 10.0, 60.0, MakeEventFd());
  const auto ask = [&](int from, int to) {
    for (int i = from; i < to; ++i)
      heartbeat->probe_sender().SendProbes(
          {i, 0, false, {1}, std::string(static_cast<size_t>(i) % 997, '?')});
  };
  constexpr int kProbes = 20000;
  ask(0, kProbes);  // more than the socket holds: the peer is stopped
  std::string bytes;
  std::thread reader([&, fd = theirs] { bytes = ReadAll(fd); });
  ask(kProbes, 2 * kProbes);
  heartbeat->Stop();
  reader.join();
  close(theirs);
  size_t at = 0;
  int messages = 0;
  ControlMessage message;
  for (; at + sizeof message <= bytes.size(); ++messages) {
    std::memcpy(&message, &bytes[at], sizeof message);
    CHECK_EQ(message.magic, ControlMessage().magic);
    at += sizeof message + message.length;
  }
  CHECK(messages > 1 && messages < 2 * kProbes);
}

TEST(APeerThatShutsDownRegularlyFailsOnlyTheNextCall) {
  World world({0, 0});
  CheckSum(&world, 10, ReduceOp::kSum);
  world.ranks[0]->OnPeerShutdown(1);
  std::vector<float> data(4, 1.0f);
  const Status status = world.ranks[0]->Run(AllreduceOf(&data));
  CHECK(status.message().find("rank 1 has shut down") != std::string::npos);
  CHECK(status.message().find("equally many batches?") != std::string::npos);
}

TEST(ARankThatLeavesAfterACallIsNotBlamedByRanksInTheCall) {
  for (const uint64_t finished : {1, 0}) {
    World world({0, 0, 0});
    std::vector<Status> ends(3);
    std::vector<std::thread> threads;
    for (int r = 0; r < 3; ++r)
      threads.emplace_back([&, r] {
        if (r == 2) std::this_thread::sleep_for(std::chrono::milliseconds(1500));
        std::vector<float> data(4, 1.0f);
        ends[r] = world.ranks[r]->Run(AllreduceOf(&data));
        if (ends[r].ok()) return;
        for (int other : {1, 2}) world.ranks[other]->Abort(ends[r]);
      });
    world.ranks[0]->OnPeerShutdown(1, finished);
    for (auto& thread : threads) thread.join();
    CHECK_EQ(world.ranks[0]->finished(), finished);
    CHECK_EQ(ends[0].ok(), finished == 1);
    std::vector<float> data(4, 1.0f);
    const Status next = world.ranks[0]->Run(AllreduceOf(&data));
    CHECK(next.message().find("rank 1 has shut down") != std::string::npos);
  }
}

}  // namespace
}  // namespace ringjax
