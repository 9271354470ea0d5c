// Straggler probes: the probes and replies of heartbeats, and the warnings and errors
// that contain the replies.
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>

#include "check.h"
#include "eager_world.h"
#include "heartbeats.h"
#include "local_world.h"

namespace ringjax {
namespace {

bool Contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

void RunTogether(World* world, const std::string& name) {
  world->Each([&name](Communicator& c) {
    std::vector<float> data(4, 1.0f);
    Call call = AllreduceOf(&data);
    call.name = name;
    CHECK(c.Run(call).ok());
  });
}

ProbeReply AskOne(Heartbeat* zero, int rank, uint64_t sequence) {
  zero->probe_sender().SendProbes({0, sequence, false, {rank}, "allreduce 'x'"});
  CHECK(
      Until([&] { return AllAnswered(zero->probe_sender().ProbeReplies(0, {rank})); }));
  return zero->probe_sender().ProbeReplies(0, {rank})[0];
}

TEST(AReplyNamesTheLastCallAndWhetherThisOneWasMade) {
  World world({0, 0});
  RunTogether(&world, "before");
  const auto beats = JoinHeartbeats(world.ranks);
  const ProbeReply late = AskOne(beats[0].get(), 1, 2);
  CHECK(late.asked && late.answered && !late.entered);
  CHECK_EQ(late.text, "its last call was allreduce 'before' (seq 1)");
  CHECK_EQ(Title(late), "rank 1 on node-1");
  CHECK(AskOne(beats[0].get(), 1, 1).entered);
}

TEST(AProbeWakesTheProgramWhichReplies) {
  World world({0, 0});
  const auto bell = MakeEventFd();
  const auto beats = JoinHeartbeats(world.ranks, {nullptr, bell.get()});
  beats[0]->probe_sender().SendProbes({0, 1, false, {1}, "allreduce 'x'"});
  pollfd rung{bell->fd(), POLLIN, 0};
  CHECK_EQ(poll(&rung, 1, 60'000), 1);
  const ProbeResponder::Asked asked = beats[1]->probe_responder().asked();
  CHECK_EQ(asked.newest, 1u);
  CHECK_EQ(asked.stalls.size(), 1u);
  CHECK_EQ(asked.stalls[0], "rank 0 waits for this rank to call allreduce 'x'");
  CHECK(beats[1]->probe_responder().asked().stalls.empty());  // only once
  beats[1]->probe_responder().Answer(asked.newest,
                                     "it is at train.py:41 in load\nbatch");
  CHECK(
      Until([&] { return beats[0]->probe_sender().ProbeReplies(0, {1})[0].answered; }));
  CHECK_EQ(ReplyText(beats[0]->probe_sender().ProbeReplies(0, {1})[0]),
           "it has made no call in this epoch; it is at train.py:41 in load batch");
  CHECK_EQ(beats[1]->probe_responder().asked().newest, 0u);
}

TEST(ABusyInterpreterDelaysNoReply) {
  World world({0, 0});
  const auto bell = MakeEventFd();
  const auto beats = JoinHeartbeats(world.ranks, {nullptr, bell.get()});
  const ProbeReply reply = AskOne(beats[0].get(), 1, 1);
  CHECK(Contains(reply.text, "its interpreter is busy"));
  beats[1]->probe_responder().Answer(1, "too late");  // is ignored
}

TEST(TheTimeoutErrorNamesTheRankAndItsPlace) {
  for (const size_t tile : {0, 4096}) {
    World world({0, 0, 0}, "", 4096, 3600, tile);
    RunTogether(&world, "before");
    const auto bell = MakeEventFd();
    const auto beats = JoinHeartbeats(world.ranks, {nullptr, nullptr, bell.get()});
    std::atomic<bool> stop{false};
    std::thread interpreter([&] {
      while (!stop) {
        pollfd rung{bell->fd(), POLLIN, 0};
        poll(&rung, 1, 10);
        if (const auto asked = beats[2]->probe_responder().asked(); asked.newest > 0)
          beats[2]->probe_responder().Answer(asked.newest,
                                             "it is at train.py:41 in load_batch");
      }
    });
    std::vector<std::thread> waiting;
    for (int r : {0, 1}) {
      waiting.emplace_back([&world, r] {
        std::vector<float> data(8, 1.0f);
        Call call = AllreduceOf(&data);
        call.name = "grads";
        call.timeout = 1;  // the communicator has 3600
        const Status status = world.ranks[static_cast<size_t>(r)]->Run(call);
        // Both ranks' timeouts end at the same time. The faster rank's abort may reach
        // the other rank before its own timeout.
        CHECK(status.code() == Code::kDeadlineExceeded ||
              status.code() == Code::kUnavailable);
        CHECK_EQ(status.rank(), 2);
        CHECK(Contains(status.message(),
                       "rank 2 on node-2 has not called allreduce 'grads' (f32[8], "
                       "SUM, seq 2) for 1 s; its last call was allreduce 'before' "
                       "(seq 1); it is at train.py:41 in load_batch"));
      });
    }
    for (auto& thread : waiting) thread.join();
    stop = true;
    interpreter.join();
  }
}

// Rank 1 of the process set also waits for rank 0. Only rank 0 is late.
TEST(InAProcessSetRepliesShowWhichRankIsLate) {
  CommunicatorOptions options;
  options.id = 7;
  options.name = "process set 7";
  options.collective_timeout = 60;
  World world({0});
  world.ranks = JoinRanks({0, 0, 0, 0}, options, 4096, 0);
  const auto beats = JoinHeartbeats(world.ranks);
  std::vector<std::thread> waiting;
  for (size_t r : {1, 2, 3}) {
    waiting.emplace_back([&world, r] {
      std::vector<float> data(8, 1.0f);
      Call call = AllreduceOf(&data);
      call.timeout = 1;
      const Status status = world.ranks[r]->Run(call);
      CHECK_EQ(status.rank(), 0);
      CHECK(
          Contains(status.message(), "rank 0 on node-0 has not called allreduce 'x'"));
    });
  }
  for (auto& thread : waiting) thread.join();
}

TEST(ACallMayHaveALongerTimeoutThanItsCommunicator) {
  World world({0, 0}, "", 4096, 0.3);
  std::thread waiting([&] {
    std::vector<float> data(4, 1.0f);
    Call call = AllreduceOf(&data);
    call.timeout = 0;
    CHECK(world.ranks[0]->Run(call).ok());
    call.timeout = -1;  // the communicator's timeout applies again
    CHECK(world.ranks[0]->Run(call).code() == Code::kDeadlineExceeded);
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(1200));
  std::vector<float> data(4, 1.0f);
  Call call = AllreduceOf(&data);
  call.timeout = 20;
  CHECK(world.ranks[1]->Run(call).ok());
  waiting.join();
}

TEST(UnrequestedRepliesAndControlCharactersAreDropped) {
  World world({0, 0});
  int pair[2];
  CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair), 0);
  auto zero = std::make_shared<Heartbeat>(0, Nodes(3),
                                          std::vector<Heartbeat::Peer>{{1, pair[0]}},
                                          10.0, 20.0, MakeEventFd());
  const auto answer = [&](uint32_t token, const std::string& text) {
    ControlMessage::ReplyHead head;
    head.token = token;
    const std::string body = WithHead(head, text);
    ControlMessage message;
    message.type = ControlMessage::Type::kReply;
    message.from = 1;
    message.to = 0;
    message.length = static_cast<uint32_t>(body.size());
    const std::string bytes = WithHead(message, body);
    CHECK_EQ(send(pair[1], bytes.data(), bytes.size(), 0),
             static_cast<ssize_t>(bytes.size()));
  };
  zero->probe_sender().SendProbes({0, 1, false, {1}, "allreduce 'x'"});
  answer(99, "a lie");
  answer(1, "\x1b[31mit is\nhere\xc2\x9b!");
  CHECK(Until([&] { return zero->probe_sender().ProbeReplies(0, {1})[0].answered; }));
  CHECK_EQ(zero->probe_sender().ProbeReplies(0, {1})[0].text, "?[31mit is here?!");
  answer(1, "another one");
  zero->Stop();
  CHECK_EQ(zero->probe_sender().ProbeReplies(0, {1})[0].text, "?[31mit is here?!");
  CHECK(zero->lost().empty());
  close(pair[1]);
}

TEST(ProbesAreSentAtTheWarningAndBeforeTheTimeout) {
  StallPolicy monitor;
  CHECK(!monitor.MustProbe(9, 10, 60));
  CHECK(monitor.MustProbe(10, 10, 60));
  CHECK(!monitor.MustProbe(10.1, 10, 60));
  CHECK(!monitor.DoneWaiting(10.2, false) && monitor.DoneWaiting(10.2, true));
  CHECK(monitor.DoneWaiting(10.8, false));
  CHECK(monitor.MustWarn(10.8, 10));
  monitor.Warned(10.8);
  CHECK(!monitor.MustWarn(20, 10) && monitor.MustWarn(21.7, 10));
  CHECK(!monitor.MustProbe(21, 10, 60) && monitor.MustProbe(21.7, 10, 60));
  monitor.Warned(22);
  CHECK(monitor.MustProbe(59, 10, 60) && !monitor.MustProbe(59.5, 10, 60));
  CHECK(monitor.MustProbe(59, 10, 60));  // data has moved since the last probe
  StallPolicy brief;  // a limit below a second leaves half of its time for the answers
  CHECK(!brief.MustProbe(0.1, 0, 0.4) && brief.MustProbe(0.2, 0, 0.4));
  StallPolicy endless;
  CHECK(!endless.MustProbe(1e9, 0, 0) && !endless.MustWarn(1e9, 0));
}

}  // namespace

namespace testing_eager {
namespace {

TEST(eager_a_submission_may_have_a_timeout_of_its_own) {
  EagerOptions options;
  options.timeout = 3600;
  Eager lanes(2, options);
  const auto beats = JoinHeartbeats(lanes.world.ranks);
  Floats x(4, 1), y(4, 1);
  // Another operation waits without a limit, and checks for late ranks are rare.
  EagerRequest patient = Place("patient", &y, &y);
  patient.timeout = 0;
  const auto endless = lanes.lanes[0]->Submit(std::move(patient));
  EagerRequest request = Place("late", &x, &x);
  request.timeout = 0.5;
  const Status status = lanes.lanes[0]->Submit(std::move(request)).value()->Wait();
  CHECK(status.code() == Code::kDeadlineExceeded);
  CHECK(Contains(status.message(),
                 "rank 1 has not submitted allreduce 'late' (f32[4], SUM) for 0.5 s; "
                 "rank 1 on node-1: it has made no call in this epoch"));
  CHECK(!endless.value()->done());
  Floats z(4, 2);
  const auto now = lanes.lanes[1]->Submit(Place("patient", &z, &z));
  CHECK(now.value()->Wait().ok() && endless.value()->Wait().ok());
  CHECK(y == Floats(4, 3));
}

}  // namespace
}  // namespace testing_eager
}  // namespace ringjax
