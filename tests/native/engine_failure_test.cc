// Failures of a call, which all ranks must receive: invalid calls, results of the wrong
// size, lost turns, exceptions, half training steps, and texts at their limits.
#include <sys/socket.h>

#include <atomic>
#include <chrono>
#include <new>
#include <thread>

#include "check.h"
#include "engine/communicator/overlap.h"
#include "engine/heartbeat/heartbeat.h"
#include "local_world.h"

namespace ringjax {
namespace {

bool Contains(const std::string& text, const std::string& part) {
  return text.find(part) != text.npos;
}

double SecondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

void CheckUsable(Communicator& c, float ranks) {
  std::vector<float> data(5, 1.0f);
  CHECK(c.Run(AllreduceOf(&data)).ok());
  CHECK_EQ(data[4], ranks);
}

TEST(ACallThatOneRankFindsInvalidFailsOnAllRanks) {
  World world({0, 0, 0}, "", 4096, 3600);  // the long timeout must not end the call
  world.Each([](Communicator& c) {
    std::vector<float> in(c.rank() == 1 ? 3 : 2, 1.0f), out(6);
    const Status status = c.Run(AllgatherOf(&in, &out, {2, 2, 2}));
    CHECK(status.code() == (c.rank() == 1 ? Code::kInvalidArgument : Code::kMismatch));
    CHECK(Contains(status.message(), "allgather 'g'"));
    CHECK(Contains(status.message(), "row counts say 2 rows, the tensor is f32[3]"));
    if (c.rank() != 1) {
      CHECK_EQ(status.rank(), 1);
      CHECK(Contains(status.message(), "rank 1 refused it"));
    }
    CHECK(!c.aborted());
    CheckUsable(c, 3.0f);
  });
}

TEST(ACallThatAllRanksFindInvalidLeavesThemInStep) {
  World world({0, 0}, "hierarchical");
  world.Each([](Communicator& c) {
    std::vector<float> in(2, 1.0f), out(5);
    CHECK(c.Run(AllgatherOf(&in, &out, {2, 2})).code() == Code::kInvalidArgument);
    std::vector<float> data(4, 1.0f);
    const Status status = c.Run(AllreduceOf(&data));  // there is only one host
    CHECK(status.code() == Code::kInvalidArgument);
    CHECK(Contains(status.message(), "hierarchical"));
    out.resize(4);
    CHECK(c.Run(AllgatherOf(&in, &out, {2, 2})).ok());
    CHECK_EQ(out[3], 1.0f);
  });
}

TEST(ResultsOfAnotherSizeAreRefused) {
  World world({0});
  std::vector<float> in(4, 1.0f), out(3);
  Call call = AllreduceOf(&in);
  call.tensors.push_back(Floats(&in, &out));
  call.names = "good\nbad";
  const Status status = world.ranks[0]->Run(call);
  CHECK(status.code() == Code::kInvalidArgument);
  CHECK(Contains(status.message(), "tensor 1 'bad'"));
  CHECK(Contains(status.message(), "f32[4]"));
  CHECK(!world.ranks[0]->Run(AllgatherOf(&in, &out, {4})).ok());
  call = AllgatherOf(&in, &in, {4});
  call.rows = {int64_t{1} << 62};  // times the bytes of a row: 2^64
  CHECK(!world.ranks[0]->Run(call).ok());
  CheckUsable(*world.ranks[0], 1.0f);
}

TEST(NumbersOfOperationsAndTypesAreChecked) {
  Call call;
  CHECK(call.SetKinds(5, 5, -1).ok());
  CHECK(call.op == Collective::kBarrier);
  CHECK(call.SetKinds(0, 1, static_cast<int>(DType::kBF16)).ok());
  CHECK(Contains(call.SetKinds(7, 0, -1).message(), "collective number 7"));
  CHECK(!call.SetKinds(-1, 0, -1).ok());
  CHECK(Contains(call.SetKinds(0, 6, -1).message(), "reduce op number 6"));
  CHECK(Contains(call.SetKinds(0, 0, 256).message(), "wire type number 256"));
}

TEST(EmptyTensorsAndSingleNumbers) {
  World world({0, 0, 0});
  world.Each([](Communicator& c) {
    float scalar = 2.0f;
    Call call;
    call.op = Collective::kAllreduce;
    call.reduce_op = ReduceOp::kSum;
    CHECK(c.Run(call).ok());
    call.tensors.push_back({DType::kF32, {0, 3}, nullptr, nullptr, 0});
    CHECK(c.Run(call).ok());
    call.tensors.push_back({DType::kF32, {}, &scalar, &scalar, 4});
    call.tensors.push_back({DType::kI8, {3, 0}, nullptr, nullptr, 0});
    CHECK(c.Run(call).ok());
    CHECK_EQ(scalar, 6.0f);
    // Only rank 1 has rows.
    std::vector<float> in(c.rank() == 1 ? 2 : 0, 7.0f), out(2);
    CHECK(c.Run(AllgatherOf(&in, &out, {0, 2, 0})).ok());
    CHECK_EQ(out[1], 7.0f);
    std::vector<float> all(4, 1.0f), part(c.rank() == 2 ? 4 : 0);
    call = AllgatherOf(&all, &part, {0, 0, 4});
    call.op = Collective::kReducescatter;
    CHECK(c.Run(call).ok());
    if (c.rank() == 2) CHECK_EQ(part[3], 3.0f);
    std::vector<float> none;
    CHECK(c.Run(AllgatherOf(&none, &none, {0, 0, 0})).ok());
    call = AllgatherOf(&none, &none, {0, 0, 0, 0, 0, 0});
    call.op = Collective::kAlltoall;
    CHECK(c.Run(call).ok());
  });
}

thread_local bool interrupted = false;

TEST(AnInterruptedTurnFailsTheOthersAtOnce) {
  World world({0, 0});
  Communicator& zero = *world.ranks[0];
  interrupt_check.store([] { return interrupted; });
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i)  // rank 1 never calls
    threads.emplace_back([&zero] {
      std::vector<float> data(4, 1.0f);
      CHECK(zero.Run(AllreduceOf(&data)).code() == Code::kCancelled);
    });
  while (zero.entered() == 0) std::this_thread::yield();
  std::thread last([&zero] {
    interrupted = true;
    std::vector<float> data(4, 1.0f);
    const Status status = zero.Run(AllreduceOf(&data));
    CHECK(status.code() == Code::kCancelled);
    CHECK(Contains(status.message(), "rank 0 was interrupted"));
  });
  last.join();
  for (auto& t : threads) t.join();
  const auto start = Clock::now();
  std::vector<float> data(4, 1.0f);
  for (int i = 0; i < 200; ++i) CHECK(!zero.Run(AllreduceOf(&data)).ok());
  // No caller waits for the lost turn, which would take 0.1 s each time.
  CHECK(SecondsSince(start) < 10);
  interrupt_check.store(nullptr);
}

TEST(AnExceptionWithinACallFailsOnAllRanks) {
  World world({0, 0}, "", 4096, 1.1);
  Communicator& zero = *world.ranks[0];
  std::vector<std::string> told;
  HeartbeatHooks hooks;
  hooks.late_ranks = [](uint64_t) -> std::vector<int> { throw std::bad_alloc(); };
  hooks.on_failure = [&](const Status& s) { told.push_back(s.message()); };
  zero.heartbeat().SetHooks(hooks);
  std::vector<float> data(4, 1.0f);
  const Status status = zero.Run(AllreduceOf(&data));  // times out, then throws
  CHECK(status.code() == Code::kUnavailable);
  CHECK(Contains(status.message(), "rank 0 failed: std::bad_alloc"));
  CHECK_EQ(told.size(), 1u);
  CHECK(!zero.Run(AllreduceOf(&data)).ok());
}

// The threads of two devices may fail at the same time, as here.
TEST(PeersReceiveOneCulpritIfTwoThreadsFailAtOnce) {
  for (int round = 0; round < 100; ++round) {
    World world({0, 0, 0});
    std::atomic<int> told{0}, ready{0};
    HeartbeatHooks hooks;
    hooks.on_failure = [&](const Status&) { ++told; };
    world.ranks[0]->heartbeat().SetHooks(hooks);
    std::vector<std::thread> threads;
    for (int culprit : {1, 2})
      threads.emplace_back([&, culprit] {
        for (++ready; ready < 2;) {
        }
        world.ranks[0]->AbortAndNotifyPeers(Code::kUnavailable, "is lost", culprit);
      });
    for (auto& thread : threads) thread.join();
    CHECK_EQ(told.load(), 1);
  }
}

TEST(ACallThatOneRankCannotMakeFailsOnAllRanksAtOnce) {
  World world({0, 0, 0}, "", 4096, 60);
  world.Each([](Communicator& c) {
    std::vector<float> data(4, 1.0f);
    const Status fits =
        c.rank() == 1 ? Status(Code::kInternal, "no memory") : OkStatus();
    const Status status = c.RunInThisEpoch(AllreduceOf(&data), fits);
    CHECK(!status.ok() && !c.aborted());
    CHECK(Contains(status.message(), "no memory"));
    CHECK(data == std::vector<float>(4, 1.0f));
    CheckUsable(c, 3.0f);
  });
}

TEST(StatsMayBeReadWhileCallsRun) {
  World world({0, 0});
  std::atomic<bool> stop{false};
  std::thread reader([&] {
    while (!stop) {
      const auto stats = world.ranks[0]->log().stats();
      if (auto found = stats.find("allreduce"); found != stats.end())
        CHECK(found->second.calls <= world.ranks[0]->entered());
      std::this_thread::yield();
    }
  });
  world.Each([](Communicator& c) {
    for (int i = 0; i < 200; ++i) CheckUsable(c, 2.0f);
  });
  stop = true;
  reader.join();
  CHECK_EQ(world.ranks[0]->log().stats().at("allreduce").calls, 200u);
}

TEST(AHalfTrainingStepEndsTheCommunicatorOnAllRanks) {
  World world({0});
  std::vector<Status> told;
  HeartbeatHooks hooks;
  hooks.on_failure = [&](const Status& s) { told.push_back(s); };
  world.ranks[0]->heartbeat().SetHooks(hooks);
  Overlap overlap(world.ranks[0]);
  std::vector<float> data(8, 1.0f);
  CHECK(overlap.Start(AllreduceOf(&data), 0, 64).ok());
  overlap.Begin(1 << 16);  // another chain may begin
  CHECK_EQ(told.size(), 0u);
  overlap.Begin(0);
  CHECK_EQ(told.size(), 1u);
  CHECK_EQ(told[0].rank(), 0);
  CHECK(overlap.Start(AllreduceOf(&data), 0, 64).ok());
  CHECK(
      Contains(overlap.Done(AllreduceOf(&data), 0).message(), "rank 0 started a step"));
}

TEST(ARankThatRestartsItsStepIsAMismatch) {
  World world({0, 0});
  world.Each([](Communicator& c) {
    std::vector<float> data(8, 1.0f);
    Call call = AllreduceOf(&data);
    call.step = 3;
    call.bucket = c.rank() == 0 ? 2 : 0;  // as large as the bucket of rank 0
    const Status status = c.Run(call);
    CHECK(status.code() == Code::kMismatch);
    CHECK(Contains(status.message(), "rank 1 sent bucket 0, rank 0 sent bucket 2"));
    CHECK_EQ(data[0], 1.0f);
  });
}

TEST(DoneOfOtherTensorsThanStartIsRefused) {
  World world({0});
  Overlap overlap(world.ranks[0]);
  std::vector<float> data(8, 1.0f), other(9);
  CHECK(overlap.Start(AllreduceOf(&data), 0, 64).ok());
  const Status status = overlap.Done(AllreduceOf(&other), 0);
  CHECK(status.code() == Code::kInvalidArgument);
  CHECK(Contains(status.message(), "bucket 0 of 'x'"));
  Call call = AllreduceOf(&data);
  call.tensors[0].room = 4;
  CHECK(!overlap.Start(call, 1, 64).ok());
  CHECK(overlap.Start(AllreduceOf(&data), 0, 64).ok());
  CHECK(overlap.Done(AllreduceOf(&data), 0).ok());
}

TEST(ExplanationsShowWhatDiffers) {
  std::vector<float> a(3), b(4);
  Call call = AllgatherOf(&a, &a, {3, 4});
  call.tensors.push_back({DType::kF32, {3, 2}});
  Call other = AllgatherOf(&b, &b, {3, 4});
  other.tensors.push_back({DType::kF64, {4, 2}});
  call.rows = other.rows = {3, 4, 3, 4};
  int culprit = 0;
  auto told = [&](const Call& one, const Call& two, size_t limit) {
    return Mismatch({Explain(one, limit), Explain(two, limit)}, {5, 9}, "set",
                    &culprit);
  };
  // Row counts may differ between ranks, so the types are the difference.
  std::string text = told(call, other, kMaxText);
  CHECK(Contains(text, "rank 9 sent f64[*,2]"));
  CHECK_EQ(culprit, 9);
  call = AllreduceOf(&a), other = AllreduceOf(&a);
  other.prescale = 1.0 + 1e-15;
  CHECK(Fingerprint(call) != Fingerprint(other));
  CHECK(Contains(told(call, other, kMaxText), "prescale_factor=1.000000000000001"));
  other = call;
  other.tensors.push_back(Floats(&a, &a));
  text = told(call, other, Explain(call, kMaxText).find(" tensors") - 1);
  CHECK(Contains(text, "tensors beyond the first 0"));
  CHECK_EQ(culprit, -1);
  // The refusing ranks count, even if they are the majority.
  text = Mismatch({Refusal("why"), Explain(call, kMaxText), Refusal("why")}, {2, 3, 4},
                  "set", &culprit);
  CHECK_EQ(text, "allreduce 'x' (set): rank 2 refused it: why. Nothing was exchanged.");
  CHECK_EQ(culprit, 2);
}

TEST(LongTextsEndBetweenCharacters) {
  CHECK_EQ(Cut("abc", 5), "abc");
  CHECK_EQ(Cut("abc", 2), "ab");
  CHECK_EQ(Cut("a\xc3\xa9", 2), "a");
  CHECK_EQ(Cut("\xe2\x82\xac", 2), "");
  int pair[2];
  CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair), 0);
  Heartbeat zero(0, Nodes(2), {{1, pair[0]}}, 0.1, 5.0, MakeEventFd());
  Heartbeat one(1, Nodes(2), {{0, pair[1]}}, 0.1, 5.0, MakeEventFd());
  std::string text = "x";
  for (int i = 0; i < 1000; ++i) text += "\xc3\xa9";
  one.Fail(text);
  for (int i = 0; i < 6000 && zero.lost().empty(); ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  const auto lost = zero.lost();
  CHECK_EQ(lost.size(), 1u);
  if (!lost.empty()) CHECK_EQ(lost[0].second, "failed: " + text.substr(0, 1023));
}

}  // namespace
}  // namespace ringjax
