// Calls whose epoch ends: a call is committed, runs again in the next epoch, or fails;
// and how long a call waits for the next epoch.
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <optional>
#include <random>

#include "base/failpoint.h"
#include "engine/heartbeat/heartbeat.h"
#include "epochs.h"
#include "heartbeats.h"

namespace ringjax::testing_epochs {
namespace {

constexpr size_t kLong = size_t{1} << 16;  // elements, too many for inline data

// A rank's call, made by a thread.
class Caller {
 public:
  Caller(const Worker& w, Collective op, size_t n, bool in_place = false, int root = 0)
      : in_(n, Part(w.number)), out_(n, -1.0f), any_(w.resilient->current()) {
    call_ = AllreduceOf(&in_);
    call_.op = op;
    call_.root = root;
    if (!in_place) call_.tensors[0].out = out_.data();
    result_ = in_place ? &in_ : &out_;
    // The constructor takes the ticket, so callers are ordered by their creation.
    thread_ = std::thread([this, ticket = any_->TakeTicket()] {
      status_ = any_->RunInTurn(ticket, call_, &epoch_);
    });
  }
  ~Caller() { Join(); }

  void Join() {
    if (thread_.joinable()) thread_.join();
  }
  Status Ended() {
    Join();
    return status_;
  }
  void Check(float want, uint32_t epoch) {
    const Status status = Ended();
    if (!status.ok()) testing::Fail(__FILE__, __LINE__, status.message());
    CHECK_EQ(result_->front(), want);
    CHECK_EQ(result_->back(), want);
    CHECK_EQ(epoch_, epoch);
  }
  void CheckUnavailable(const std::string& part) {
    const Status status = Ended();
    CHECK(status.code() == Code::kUnavailable);
    if (!Contains(status.message(), part))
      testing::Fail(__FILE__, __LINE__, status.message());
  }

 private:
  std::vector<float> in_, out_;
  std::vector<float>* result_;
  Call call_;
  std::shared_ptr<Communicator> any_;
  Status status_;
  uint32_t epoch_ = 77;
  std::thread thread_;
};

constexpr auto kSum = Collective::kAllreduce;

void AwaitBegun(const Worker& w, uint64_t calls) {
  while (w.communicator->progress()->begun() < calls) std::this_thread::yield();
}

TEST(AnInlineCallThatARankHasAbortedRunsAgain) {
  Job job(3, 4096);
  Caller late(job.worker(1), kSum, 5);
  AwaitBegun(job.worker(1), 1);
  Pause(2000);
  // The data that worker 1 waits for arrives only after worker 1 has stopped.
  job.worker(1).communicator->Abort(Status(Code::kUnavailable, "stop"));
  ProgressReport standing;
  CHECK(job.worker(1).communicator->Quiesce(5, &standing).ok());
  CHECK_EQ(standing.done, 0u);
  Caller zero(job.worker(0), kSum, 5), two(job.worker(2), kSum, 5);
  AwaitBegun(job.worker(0), 1);
  job.Kill(&job.worker(2));
  job.Revoke();
  CHECK_EQ(job.decision().finished, 0u);
  job.Join();
  for (Worker* w : job.members()) job.Install(w);
  late.Check(3, 1);
  zero.Check(3, 1);
}

// A process that was frozen does not know that it is fenced, and continues for a
// moment.
TEST(AFencedRankReturnsFromNoCallThatTheOthersRunAgain) {
  std::minstd_rand random(7);
  for (int turn = 0; turn < 200; ++turn) {
    const size_t n = turn % 2 ? 5 : 900;  // inline data, or a tile
    const bool late = turn % 4 < 2;
    Job job(3, 4096);
    Worker& frozen = job.worker(2);
    Caller zero(job.worker(0), kSum, n), one(job.worker(1), kSum, n);
    std::optional<Caller> two;
    if (!late) two.emplace(frozen, kSum, n);
    Pause(static_cast<int>(random() % 150));
    job.Fence(&frozen);
    job.Revoke();
    if (late) two.emplace(frozen, kSum, n);
    const bool finished = job.decision().finished == 1;
    job.Join();
    for (Worker* w : job.members()) job.Install(w);
    zero.Check(finished ? 7 : 3, finished ? 0 : 1);
    one.Check(finished ? 7 : 3, finished ? 0 : 1);
    Pause(1000);
    frozen.resilient->End(Status(Code::kUnavailable, "fenced"));
    frozen.communicator->Abort(Status(Code::kUnavailable, "fenced"));
    if (two->Ended().ok()) CHECK(finished);
    CHECK(!(late && finished));
  }
}

// On a busy machine the reason of an abort may arrive late, and a peer that has stopped
// may only be between two epochs.
TEST(APeerThatStoppedIsNotBlamedBeforeTheReasonArrives) {
  Job job(2, 4096);
  CHECK(ArmFailpoint("call.agreed", "stop", 0, 1).ok());
  CHECK(ArmFailpoint("call.complete", "sleep", 0.1, 1).ok());  // only the other one
  Caller zero(job.worker(0), kSum, 5), one(job.worker(1), kSum, 5);
  const auto stopped = [&](int w) { return job.worker(w).communicator->aborted(); };
  while (!stopped(0) && !stopped(1)) std::this_thread::yield();
  const int first = stopped(0) ? 0 : 1;
  Pause(500'000);
  CHECK(!stopped(1 - first));
  job.Kill(&job.worker(first));
  job.Continue();
  CHECK((first ? zero : one).Ended().ok());
  CHECK(!(first ? one : zero).Ended().ok());
}

TEST(ACallWithAllItsResultsOnlyWaitsForTheOthers) {
  Job job(2, 0);
  Caller one(job.worker(1), kSum, kLong);
  Caller zero(job.worker(0), kSum, kLong);
  zero.Check(3, 0);
  one.Check(3, 0);
  ProgressReport standing;
  CHECK(job.worker(0).communicator->Quiesce(1, &standing).code() ==
        Code::kFailedPrecondition);
  job.Kill(&job.worker(1));
  job.Continue();
  CHECK_EQ(job.decision().finished, 1u);
  Caller alone(job.worker(0), kSum, kLong);
  alone.Check(1, 1);
}

TEST(ACallRunsAgainFromItsInputsAndReportsItsEpoch) {
  for (size_t n : {size_t{3}, kLong}) {
    Job job(3, n == 3 ? 4096 : 0);
    Caller zero(job.worker(0), kSum, n), two(job.worker(2), kSum, n);
    AwaitBegun(job.worker(0), 1);
    job.Kill(&job.worker(1));
    job.Continue();
    zero.Check(5, 1);
    two.Check(5, 1);
  }
}

TEST(ACallThatOverwroteItsInputsFailsOnAllRanks) {
  for (bool in_place : {true, false}) {
    Job job(3, 0);
    Caller zero(job.worker(0), kSum, kLong, in_place);
    Caller one(job.worker(1), kSum, kLong);
    {  // Rank 2 agrees to the call, and dies before any of its data moves.
      std::vector<float> data(kLong);
      bool refused = false;
      CHECK(job.worker(2).communicator->Compare(AllreduceOf(&data), {}, &refused).ok());
    }
    while (in_place && job.worker(0).communicator->progress()->Read().repeatable)
      std::this_thread::yield();
    Pause(2000);
    job.Kill(&job.worker(2));
    job.Continue();
    for (Caller* c : {&zero, &one}) {
      if (in_place)
        c->CheckUnavailable("rank 2 is gone; the call was given up on all ranks");
      else
        c->Check(3, 1);
    }
    Caller a(job.worker(0), kSum, 5), b(job.worker(1), kSum, 5);
    a.Check(3, 1);
    b.Check(3, 1);
  }
}

TEST(ABroadcastInTilesEndsForAllRanksOrRunsAgain) {
  for (const bool lost : {false, true}) {
    Job job(4, 4096);
    Caller zero(job.worker(0), Collective::kBroadcast, kLong);
    Caller one(job.worker(1), Collective::kBroadcast, kLong);
    Caller two(job.worker(2), Collective::kBroadcast, kLong);
    std::vector<float> data(kLong);
    Call call = AllreduceOf(&data);
    call.op = Collective::kBroadcast;
    if (lost) {  // rank 3 agrees to the call, and dies before it reads any tile
      bool refused = false;
      CHECK(job.worker(3).communicator->Compare(call, {}, &refused).ok());
      job.Kill(&job.worker(3));
      job.Continue();
    } else {
      CHECK(job.worker(3).communicator->Run(call).ok());
    }
    for (Caller* c : {&zero, &one, &two}) c->Check(Part(0), lost ? 1 : 0);
    const auto stats = job.worker(1).communicator->log().stats().at("broadcast");
    CHECK_EQ(stats.algorithms.at("shared"), stats.calls);
  }
}

TEST(ARankOutsideTheCallFailsItsNextCallUnlessItResumes) {
  for (bool knows : {false, true}) {
    Job job(3, 4096);
    Caller zero(job.worker(0), kSum, 5);
    AwaitBegun(job.worker(0), 1);
    job.Kill(&job.worker(2));
    job.Revoke();
    job.decision().repeats = false;  // "all start again"
    job.Join();
    for (Worker* w : job.members()) job.Install(w);
    zero.CheckUnavailable("given up");
    if (knows) {
      job.worker(1).resilient->Resume();
    } else {
      Caller one(job.worker(1), kSum, 5);
      one.CheckUnavailable("given up");
    }
    Caller a(job.worker(0), kSum, 5), b(job.worker(1), kSum, 5);
    a.Check(3, 1);
    b.Check(3, 1);
  }
}

TEST(ABroadcastFollowsItsRootOrFailsWithoutIt) {
  for (int root : {2, 0}) {
    Job job(4, 0);
    Caller one(job.worker(1), Collective::kBroadcast, 5, false, root);
    Caller two(job.worker(2), Collective::kBroadcast, 5, false, root);
    Caller three(job.worker(3), Collective::kBroadcast, 5, false, root);
    for (int r : {1, 2, 3}) AwaitBegun(job.worker(r), 1);
    job.Kill(&job.worker(0));
    job.Continue();
    for (Caller* c : {&one, &two, &three}) {
      if (root == 2)
        c->Check(Part(2), 1);
      else
        c->CheckUnavailable("root_rank 0 was lost");
    }
  }
}

TEST(AMismatchStillFailsOneCallOnly) {
  Job job(3, 4096);
  {
    Caller zero(job.worker(0), kSum, 5), one(job.worker(1), kSum, 5);
    Caller two(job.worker(2), kSum, 6);
    for (Caller* c : {&zero, &one, &two}) CHECK(c->Ended().code() == Code::kMismatch);
  }
  Caller zero(job.worker(0), kSum, 5), one(job.worker(1), kSum, 5);
  AwaitBegun(job.worker(0), 2);
  AwaitBegun(job.worker(1), 2);
  job.Kill(&job.worker(2));
  job.Continue();
  CHECK_EQ(job.decision().finished, 1u);
  zero.Check(3, 1);
  one.Check(3, 1);
}

TEST(CallsBehindAParkedOneKeepTheirOrder) {
  Job job(3, 4096);
  std::vector<std::unique_ptr<Caller>> zero, one;
  for (int i = 0; i < 4; ++i) {
    zero.push_back(std::make_unique<Caller>(job.worker(0), kSum, 5 + i));
  }
  job.Kill(&job.worker(2));
  job.Continue();
  for (int i = 0; i < 4; ++i) {
    one.push_back(std::make_unique<Caller>(job.worker(1), kSum, 5 + i));
    one.back()->Check(3, 1);
    zero[static_cast<size_t>(i)]->Check(3, 1);
  }
}

TEST(AMissingRankEndsTheEpochButNotTheJob) {
  Job job(3, 0, 30, 1.1);
  Caller zero(job.worker(0), kSum, 5), one(job.worker(1), kSum, 5);
  while (!job.worker(0).communicator->aborted()) std::this_thread::yield();
  const Status why = job.worker(0).communicator->abort_status();
  CHECK(why.code() == Code::kUnavailable);
  CHECK_EQ(why.rank(), 2);
  CHECK(Contains(why.message(), "rank 2 has not called"));
  job.Kill(&job.worker(2));
  job.Continue();
  zero.Check(3, 1);
  one.Check(3, 1);
}

// A child has the objects of its parent but no peers, so no call may succeed.
TEST(NoCallSucceedsInAForkedProcess) {
  ResilientComm resilient(0);
  const pid_t child = fork();
  if (child == 0) {
    std::shared_ptr<Communicator> next;
    const bool fails =
        !resilient.AwaitDecision(0, 1).ok() && !resilient.AwaitNextEpoch(0, &next).ok();
    _exit(fails ? 0 : 1);
  }
  int status = -1;
  CHECK_EQ(waitpid(child, &status, 0), child);
  CHECK_EQ(status, 0);
}

TEST(NoEpochFollowsAfterTheEpochTimeout) {
  Job job(2, 4096, 0.3);
  Caller zero(job.worker(0), kSum, 5);
  AwaitBegun(job.worker(0), 1);
  job.worker(0).communicator->Abort(Status(Code::kUnavailable, "rank 1 is gone", 1));
  zero.CheckUnavailable("have not gone on within 0.3 s after: rank 1 is gone");
  CHECK_EQ(zero.Ended().rank(), 1);
  const auto next = job.worker(0).communicator;
  CHECK(job.worker(0).resilient->Install(next).code() == Code::kFailedPrecondition);
}

TEST(TheEndWakesParkedAndWaitingCalls) {
  Job job(2, 4096);
  Caller parked(job.worker(0), kSum, 5);
  AwaitBegun(job.worker(0), 1);
  Caller waiting(job.worker(0), kSum, 5);
  job.worker(0).communicator->Abort(Status(Code::kUnavailable, "rank 1 is gone", 1));
  ProgressReport standing;
  CHECK(job.worker(0).communicator->Quiesce(5, &standing).ok());
  job.worker(0).resilient->End(Status(Code::kUnavailable, "it is over", 1));
  parked.CheckUnavailable("");
  waiting.CheckUnavailable("it is over");
}

std::atomic<bool> interrupted{false};

TEST(AnInterruptEndsAParkedCallForGood) {
  Job job(2, 4096);
  Caller zero(job.worker(0), kSum, 5);
  AwaitBegun(job.worker(0), 1);
  job.worker(0).communicator->Abort(Status(Code::kUnavailable, "rank 1 is gone", 1));
  ProgressReport standing;
  CHECK(job.worker(0).communicator->Quiesce(5, &standing).ok());
  interrupt_check.store([] { return interrupted.load(); });
  interrupted = true;
  CHECK(zero.Ended().code() == Code::kCancelled);
  interrupted = false;
  interrupt_check.store(nullptr);
  CHECK(!job.worker(0).resilient->end_status().ok());
  CHECK(!job.worker(0).resilient->Install(nullptr).ok());
}

TEST(CallsBeforeTheInstallationAreNotCounted) {
  Job job(2, 4096);
  Caller zero(job.worker(0), kSum, 5);
  AwaitBegun(job.worker(0), 1);
  job.Kill(&job.worker(1));
  job.Revoke();
  job.Join();
  Worker& w = job.worker(0);
  std::vector<float> data(4, 2.0f);
  for (int i = 0; i < 3; ++i) CHECK(w.communicator->Run(AllreduceOf(&data)).ok());
  job.Install(&w);
  zero.Check(1, 1);
  w.communicator->Abort(Status(Code::kUnavailable, "stop"));
  ProgressReport standing;
  CHECK(w.communicator->Quiesce(5, &standing).ok());
  CHECK_EQ(standing.returned, 1u);
  CHECK_EQ(standing.done, 1u);
  CHECK(standing.repeatable);
}

// In a static job no epoch follows, so no call may wait for one after an abort.
TEST(AStaticCommunicatorEndsWithItsOnlyEpoch) {
  World world({0, 0});
  Communicator& c = *world.ranks[0];
  ResilientComm& resilient = *c.resilient();
  CHECK(!resilient.repairs());
  CHECK(resilient.end_status().ok());
  c.Abort(Status(Code::kDeadlineExceeded, "is late", 1));
  c.Abort(Status(Code::kUnavailable, "is gone", 0));
  CHECK_EQ(c.abort_status().message(), "is late");
  CHECK_EQ(resilient.end_status().message(), "is late");
  std::vector<float> data(4, 1);
  const Call call = AllreduceOf(&data);
  for (const Status& status : {c.Run(call), c.RunInThisEpoch(call)}) {
    CHECK(status.code() == Code::kDeadlineExceeded);
    CHECK_EQ(status.rank(), 1);
    CHECK(Contains(status.message(), "allreduce 'x' (f32[4], SUM, seq 0): is late"));
  }
  std::shared_ptr<Communicator> next;
  CHECK(resilient.AwaitNextEpoch(c.epoch_index(), &next).code() ==
        Code::kDeadlineExceeded);
  ProgressReport report;
  CHECK(c.Quiesce(20, &report).ok());
  CHECK_EQ(report.done, 0u);
}

TEST(ChangesIncludeAllEpochsInBetween) {
  ResilientComm resilient(0);
  CHECK(resilient.Install(nullptr).ok());
  CHECK(resilient.Install(nullptr, {0, false, {0, -1, 1}, "one"}).ok());
  CHECK(resilient.Install(nullptr, {0, true, {1, 0}, "two"}).ok());
  const auto is = [&](uint64_t from, uint64_t to, const std::vector<int>& ranks,
                      bool repeats, const std::string& reason) {
    const ResilientComm::Change change = resilient.Changes(from, to);
    return change.ranks == ranks && change.repeats == repeats &&
           change.reason == reason;
  };
  CHECK(is(1, 2, {0, -1, 1}, false, "one"));
  CHECK(is(2, 3, {1, 0}, true, "two"));
  CHECK(is(1, 3, {1, -1, 0}, false, "two"));
  CHECK(is(0, 3, {1, -1, 0}, false, "two"));
  CHECK(is(3, 3, {}, true, "two"));
  CHECK(is(1, 1, {}, true, ""));
}

TEST(EpochsMayGoInAnyOrder) {
  std::shared_ptr<Communicator> first;
  {
    Job job(2, 4096);
    first = job.worker(0).communicator;
    job.Kill(&job.worker(1));
    job.Continue();
    std::vector<float> data(4, 2.0f);
    uint32_t epoch = 0;
    CHECK(first->Run(AllreduceOf(&data), &epoch).ok());  // not the one it runs in
    CHECK_EQ(epoch, 1u);
    job.worker(0).resilient->End(Status(Code::kUnavailable, "over"));
  }
  std::vector<float> data(4, 2.0f);
  CHECK(Contains(first->Run(AllreduceOf(&data)).message(), "over"));
}

TEST(AHeartbeatReportsLostRanksAndRanksThatLeft) {
  World world({0, 0, 0});
  int one[2], two[2];
  CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, one), 0);
  CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, two), 0);
  const auto told = MakeEventFd();
  auto zero = std::make_shared<Heartbeat>(
      0, Nodes(3), std::vector<Heartbeat::Peer>{{1, one[0]}, {2, two[0]}}, 0.1, 5.0,
      MakeEventFd(), std::make_unique<EventFd>(dup(told->fd())));
  zero->Watch(world.ranks[0]);
  auto peer = std::make_shared<Heartbeat>(
      1, Nodes(3), std::vector<Heartbeat::Peer>{{0, one[1]}}, 0.1, 5.0, MakeEventFd());
  auto rung = [&told] {
    pollfd p{told->fd(), POLLIN, 0};
    const bool came = poll(&p, 1, 60'000) == 1;
    told->Drain();
    return came;
  };
  peer->Watch(world.ranks[1]);
  world.Each([](Communicator& c) {
    std::vector<float> data(4, 1.0f);
    CHECK(c.Run(AllreduceOf(&data)).ok());
  });
  peer->Leave();
  CHECK(rung());
  CHECK_EQ(zero->left().size(), 1u);
  CHECK(zero->lost().empty());
  CHECK(world.ranks[0]->abort_state().CheckShutdowns(1).ok());  // it has finished that
                                                                // one
  CHECK(Contains(world.ranks[0]->abort_state().CheckShutdowns(2).message(),
                 "has shut down"));
  // An abort that names a peer counts as the peer's failure, too.
  world.ranks[0]->AbortAndNotifyPeers(Code::kDeadlineExceeded, "has not called for 3 s",
                                      2);
  CHECK(rung());
  CHECK_EQ(zero->lost().size(), 1u);
  CHECK_EQ(zero->lost()[0].first, 2);
  close(two[1]);
}

}  // namespace
}  // namespace ringjax::testing_epochs
