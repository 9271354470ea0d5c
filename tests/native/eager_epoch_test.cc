// The eager lane in a job that continues after it has lost ranks: pending operations at
// the end of an epoch, which of them are repeated, and which fail. See also
// eager_chaos_test.cc.
#include <chrono>

#include "check.h"
#include "eager_epochs.h"

namespace ringjax {
namespace {

using testing_eager::Epochs;
using testing_eager::Floats;
using testing_eager::Place;
using testing_eager::Says;
using WorkPtr = std::shared_ptr<Work>;

// Checks that the lanes of all members can still reduce.
void CheckUsable(Epochs& job) {
  const auto size = static_cast<float>(job.members.size());
  std::vector<Floats> data(job.members.size(), Floats(9, 2));
  std::vector<WorkPtr> works;
  for (size_t r = 0; r < data.size(); ++r) {
    auto work = job.lane(job.members[r]).Submit(Place("usable", &data[r], &data[r]));
    CHECK_EQ(work.status().message(), "");
    if (work.ok()) works.push_back(work.value());
  }
  for (const WorkPtr& work : works) CHECK_EQ(work->Wait().message(), "");
  for (const Floats& x : data) CHECK(x == Floats(9, 2 * size));
}

TEST(eager_epoch_pending_operations_end_without_the_lost_rank) {
  for (const size_t tile : {0, 4096}) {
    Epochs job(3, {}, tile);
    std::vector<Floats> x(3), y(3), g(3);
    std::vector<WorkPtr> works;
    for (int w : {0, 2}) {  // worker 1 has submitted nothing
      x[w] = Floats(5, 1 + w);
      y[w] = Floats(5);
      g[w] = Floats(1 + w, w);
      works.push_back(job.lane(w).Submit(Place("in place", &x[w], &x[w])).value());
      works.push_back(job.lane(w).Submit(Place("beside", &g[w], &g[w])).value());
      EagerRequest gather = Place("rows", &g[w], nullptr);
      gather.what.op = Collective::kAllgather;
      if (w == 0) works.push_back(job.lane(w).Submit(std::move(gather)).value());
    }
    works[1].reset();  // the caller may drop a work
    job.Kill(1);
    job.Repair("rank 1 was killed");
    // This operation is submitted in the new epoch.
    EagerRequest gather = Place("rows", &g[2], nullptr);
    gather.what.op = Collective::kAllgather;
    WorkPtr last = job.lane(2).Submit(std::move(gather)).value();
    CHECK_EQ(works[0]->Wait().message(), "");
    CHECK_EQ(works[3]->Wait().message(), "");
    CHECK(x[0] == Floats(5, 4));
    CHECK(x[2] == Floats(5, 4));
    // One row of worker 0, and three of worker 2, which now is rank 1.
    CHECK(last->Wait().ok() && works[2]->Wait().ok());
    CHECK_EQ(last->outputs()[0].dims[0], int64_t{4});
    CHECK(last->outputs()[0].received == (std::vector<int64_t>{1, 3}));
    CHECK_EQ(job.lane(2).communicator()->rank(), 1);
    CheckUsable(job);
  }
}

TEST(eager_epoch_idle_lanes_continue) {
  Epochs job(4);
  CheckUsable(job);
  job.Kill(0);
  job.Repair("rank 0 was killed");
  CheckUsable(job);
  job.Kill(3);
  job.Repair("rank 2 was killed");
  CheckUsable(job);
  CHECK_EQ(job.lane(1).stats().submissions, 3u);
  CHECK_EQ(job.lane(1).stats().calls, 3u);
  job.Kill(1);
  job.Repair("rank 0 was killed");
  CheckUsable(job);  // alone
}

TEST(eager_epoch_epochs_pass_while_a_lane_is_parked) {
  Epochs job(4);
  Floats x(3, 1), y(3, 1);
  WorkPtr a = job.lane(1).Submit(Place("x", &x, &x)).value();
  job.Kill(0);
  job.Revoke("rank 0 was killed");
  job.Regroup();
  job.Install(1);  // the other workers skip this epoch
  EagerRequest cast = Place("b", &x, &x);
  cast.what.op = Collective::kBroadcast;
  cast.what.root = 1;  // worker 2
  WorkPtr b = job.lane(1).Submit(std::move(cast)).value();
  job.Kill(3);
  job.Repair("rank 2 was killed");
  WorkPtr c = job.lane(2).Submit(Place("x", &y, &y)).value();
  CHECK_EQ(a->Wait().message(), "");
  CHECK_EQ(c->Wait().message(), "");
  CHECK(x == Floats(3, 2) && y == Floats(3, 2));
  y = Floats(3, 7);
  EagerRequest too = Place("b", &y, &y);
  too.what.op = Collective::kBroadcast;
  too.what.root = 1;
  CHECK_EQ(job.lane(2).Submit(std::move(too)).value()->Wait().message(), "");
  CHECK_EQ(b->Wait().message(), "");
  CHECK(x == Floats(3, 7));
  CheckUsable(job);
}

TEST(eager_epoch_submissions_while_it_is_parked) {
  Epochs job(3);
  job.Kill(2);
  job.Revoke("rank 2 was killed");
  Floats x(4, 1), y(4, 2);
  WorkPtr a = job.lane(0).Submit(Place("x", &x, &x)).value();
  WorkPtr b = job.lane(1).Submit(Place("x", &y, &y)).value();
  CHECK(!job.lane(0).Submit(Place("x", &y, &y)).ok());  // still a duplicate
  WorkPtr join = job.lane(1).Join().value();
  CHECK(!a->done());
  job.Regroup();
  for (int w : job.members) job.Install(w);
  CHECK_EQ(a->Wait().message(), "");
  CHECK_EQ(b->Wait().message(), "");
  CHECK(x == Floats(4, 3) && y == Floats(4, 3));
  WorkPtr other = job.lane(0).Join().value();
  CHECK_EQ(join->Wait().message(), "");
  CHECK(other->Wait().ok());
  CHECK_EQ(join->last_joined(), 0);
  CheckUsable(job);
}

// A pending operation of each kind, submitted by all but one worker.
struct Kinds {
  explicit Kinds(Epochs& job) {
    const auto size = static_cast<size_t>(job.members.size());
    for (size_t r = 0; r + 1 < size; ++r) {
      data.push_back(std::make_unique<Floats>(12, 1));
      results.push_back(std::make_unique<Floats>(12));
      EagerLane& lane = job.lane(job.members[r]);
      auto add = [&](Collective op, const std::string& name, int root,
                     std::vector<int64_t> splits) {
        const bool made = op == Collective::kAlltoall;
        EagerRequest request =
            Place(name, data.back().get(), made ? nullptr : results.back().get());
        request.what.op = op;
        request.what.root = root;
        request.what.splits = std::move(splits);
        works.push_back(lane.Submit(std::move(request)).value());
      };
      add(Collective::kBroadcast, "of the last", static_cast<int>(size) - 1, {});
      add(Collective::kAlltoall, "with splits", 0, {3, 3, 3, 3});
      add(Collective::kReducescatter, "parts", 0, {});
      add(Collective::kAlltoall, "equal parts", 0, {});
    }
  }
  static constexpr size_t kEach = 4;
  std::vector<std::unique_ptr<Floats>> data, results;
  std::vector<WorkPtr> works;  // kEach of the first, then of the second ...
};

TEST(eager_epoch_operations_that_cannot_repeat_say_why) {
  Epochs job(4);
  Kinds kinds(job);
  Floats odd(3, 1);
  EagerRequest adasum = Place("adasum", &odd, &odd);
  adasum.what.reduce_op = ReduceOp::kAdasum;
  WorkPtr power = job.lane(0).Submit(std::move(adasum)).value();
  job.Kill(3);
  job.Repair("rank 3 was killed");
  for (size_t r = 0; r < 3; ++r) {
    const WorkPtr* of = &kinds.works[r * Kinds::kEach];
    for (size_t i = 0; i < 3; ++i) CHECK(of[i]->Wait().code() == Code::kUnavailable);
    CHECK(Says(of[0]->Wait(), "RINGJAX[world, epoch 1]: broadcast 'of the last'"));
    CHECK(Says(of[0]->Wait(), "root_rank 3 was lost"));
    CHECK(Says(of[0]->Wait(), "rank 3 was killed"));
    CHECK(Says(of[1]->Wait(), "submit it again with splits for 3 ranks"));
    CHECK(Says(of[2]->Wait(), "another number of ranks"));
    CHECK_EQ(of[3]->Wait().message(), "");
    CHECK_EQ(of[3]->outputs()[0].dims[0], int64_t{12});
  }
  CHECK(power->Wait().code() == Code::kUnavailable);
  CHECK(Says(power->Wait(), "Adasum needs a power of two of ranks"));
  CheckUsable(job);
}

TEST(eager_epoch_a_root_keeps_its_work_under_its_new_rank) {
  Epochs job(4);
  std::vector<Floats> data;
  for (int w = 0; w < 4; ++w) data.emplace_back(6, w);
  std::vector<WorkPtr> works;
  for (int w : {0, 3, 2}) {
    EagerRequest cast = Place("b", &data[w], &data[w]);
    cast.what.op = Collective::kBroadcast;
    cast.what.root = 2;
    works.push_back(job.lane(w).Submit(std::move(cast)).value());
  }
  job.Kill(1);
  job.Repair("rank 1 was killed");
  for (const WorkPtr& work : works) CHECK_EQ(work->Wait().message(), "");
  for (int w : {0, 2, 3}) CHECK(data[w] == Floats(6, 2));
  CheckUsable(job);
}

TEST(eager_epoch_a_restart_fails_only_pending_operations) {
  Epochs job(3);
  Floats x(4, 1), y(4, 1);
  WorkPtr pending = job.lane(0).Submit(Place("x", &x, &x)).value();
  WorkPtr join = job.lane(1).Join().value();
  job.Revoke("rank 2 raised ValueError");
  WorkPtr parked = job.lane(1).Submit(Place("y", &y, &y)).value();
  job.Regroup(false);
  for (int w : job.members) job.Install(w);
  for (const WorkPtr& work : {pending, join, parked}) {
    CHECK(work->Wait().code() == Code::kUnavailable);
    CHECK(Says(work->Wait(), "training starts again: rank 2 raised ValueError"));
  }
  CHECK(x == Floats(4, 1));
  CheckUsable(job);
  CHECK_EQ(job.lane(0).stats().failures, 1u);
}

TEST(eager_epoch_newcomers_take_part) {
  Epochs job(2);
  Floats x(4, 1), y(4, 2), z(4, 4);
  WorkPtr a = job.lane(0).Submit(Place("x", &x, &x)).value();
  Floats parts(4, 1), part(2);
  EagerRequest scatter = Place("s", &parts, &part);
  scatter.what.op = Collective::kReducescatter;
  WorkPtr sized = job.lane(0).Submit(std::move(scatter)).value();
  job.Repair("others come", true, {job.Add()});
  WorkPtr b = job.lane(1).Submit(Place("x", &y, &y)).value();
  WorkPtr c = job.lane(2).Submit(Place("x", &z, &z)).value();
  for (const WorkPtr& work : {a, b, c}) CHECK_EQ(work->Wait().message(), "");
  CHECK(x == Floats(4, 7) && y == x && z == x);
  CHECK(Says(sized->Wait(), "another number of ranks; submit it again for 3 ranks"));
  CheckUsable(job);
}

TEST(eager_epoch_close_while_parked_waits_for_no_limit) {
  Epochs job(3);
  Floats x(4, 1);
  WorkPtr pending = job.lane(0).Submit(Place("x", &x, &x)).value();
  job.Kill(1);
  job.Revoke("rank 1 was killed");
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  const auto start = Clock::now();
  for (int w : {0, 2}) job.lane(w).Close();
  CHECK(Clock::now() - start <
        std::chrono::seconds(30));  // Close must not wait for the limit of 60 s
  CHECK(pending->Wait().code() == Code::kUnavailable);
  CHECK(!job.lane(0).Submit(Place("y", &x, &x)).ok());
  CHECK(job.lane(2).aborted());
}

TEST(eager_epoch_the_end_of_a_resilient_communicator_is_the_end_of_the_lane) {
  Epochs job(3), impatient(2, {}, 4096, 0.2);
  Floats x(4, 1), y(4, 1);
  WorkPtr pending = job.lane(0).Submit(Place("x", &x, &x)).value();
  WorkPtr waits = impatient.lane(0).Submit(Place("y", &y, &y)).value();
  job.Kill(1);
  job.Revoke("rank 1 was killed");
  job.workers[0].resilient->End(
      Status(Code::kUnavailable, "2 ranks are left, at least 3 are needed"));
  CHECK(pending->Wait().code() == Code::kUnavailable);
  CHECK(Says(pending->Wait(), "at least 3 are needed"));
  const Status later = job.lane(0).Submit(Place("y", &x, &x)).status();
  CHECK(Says(later, "at least 3 are needed"));
  CHECK(job.lane(0).aborted());
  // The lane also ends if no epoch follows within the epoch timeout.
  impatient.Kill(1);
  impatient.Revoke("rank 1 was killed");
  CHECK(waits->Wait().code() == Code::kUnavailable);
  CHECK(Says(waits->Wait(), "rank 1 was killed"));
}

TEST(eager_epoch_an_interrupt_is_final) {
  Epochs job(2);
  Floats x(4, 1);
  WorkPtr pending = job.lane(0).Submit(Place("x", &x, &x)).value();
  job.workers[0].communicator->Abort(
      Status(Code::kCancelled, "rank 0 was interrupted"));
  CHECK(pending->Wait().code() == Code::kCancelled);
  CHECK(job.lane(0).aborted());
}

}  // namespace
}  // namespace ringjax
