// Failures of the eager lane: ranks that disagree, are late, leave or break the
// protocol, and callers that submit impossible operations.
#include <barrier>
#include <chrono>

#include "check.h"
#include "eager_world.h"

namespace ringjax {
namespace {

using testing_eager::Eager;
using testing_eager::Floats;
using testing_eager::Place;
using testing_eager::Says;

// Checks that the lane still works.
void CheckUsable(EagerLane& lane, int rank) {
  const int size = lane.communicator()->size();
  Floats x(9, rank), y(9);
  CHECK(lane.Submit(Place("usable", &x, &y)).value()->Wait().ok());
  CHECK(y == Floats(9, static_cast<float>(size * (size - 1) / 2)));
}

TEST(eager_a_mismatch_has_one_text_on_all_ranks) {
  Eager world(3);
  std::vector<std::string> texts(3);
  world.Each([&](EagerLane& lane, int rank) {
    Floats x(rank == 2 ? 5 : 4, rank), other(2, rank);
    auto bad = lane.Submit(Place("grad", &x, &x)).value();
    auto good = lane.Submit(Place("other", &other, &other)).value();
    const Status status = bad->Wait();
    CHECK(status.code() == Code::kMismatch);
    CHECK_EQ(status.rank(), 2);
    CHECK(Says(status, "Mismatched shapes of allreduce 'grad'"));
    texts[rank] = status.message();
    CHECK(good->Wait().ok());
    CHECK(other == Floats(2, 3));
    CHECK(x == Floats(x.size(), rank));  // untouched
    CheckUsable(lane, rank);
  });
  CHECK_EQ(texts[0], texts[1]);
  CHECK_EQ(texts[0], texts[2]);
}

TEST(eager_a_duplicate_is_refused_at_once) {
  Eager world(2);
  std::barrier refused(2);
  world.Each([&](EagerLane& lane, int rank) {
    Floats x(4, rank), y(4, rank);
    if (rank == 0) {
      auto first = lane.Submit(Place("x", &x, &x)).value();
      const auto second = lane.Submit(Place("x", &y, &y));
      CHECK(second.status().code() == Code::kInvalidArgument);
      CHECK(Says(second.status(), "duplicate"));
      CHECK(Says(second.status(), "allreduce 'x'"));
      refused.arrive_and_wait();
      // An operation of another kind may have the name.
      EagerRequest barrier;
      barrier.what.op = Collective::kBarrier;
      barrier.what.name = "x";
      auto other = lane.Submit(std::move(barrier)).value();
      CHECK(first->Wait().ok());
      CHECK(other->Wait().ok());
    } else {
      refused.arrive_and_wait();
      auto first = lane.Submit(Place("x", &x, &x)).value();
      EagerRequest barrier;
      barrier.what.op = Collective::kBarrier;
      barrier.what.name = "x";
      CHECK(lane.Submit(std::move(barrier)).value()->Wait().ok());
      CHECK(first->Wait().ok());
    }
    CHECK(x == Floats(4, 1));
    CHECK(y == Floats(4, rank));
    CheckUsable(lane, rank);
  });
}

TEST(eager_impossible_operations_are_refused) {
  Eager world(1);
  EagerLane& lane = *world.lanes[0];
  auto code = [&lane](EagerRequest request) {
    return lane.Submit(std::move(request)).status().code();
  };
  Floats x(4, 1);
  EagerRequest cuda = Place("x", &x, &x);
  cuda.what.cuda = true;
  const Status status = lane.Submit(std::move(cuda)).status();
  CHECK(status.code() == Code::kInvalidArgument);
  CHECK(Says(status, "CUDA tensors need"));
  CHECK(code(Place("x", &x, nullptr)) == Code::kInvalidArgument);
  EagerRequest nowhere = Place("x", &x, &x);
  nowhere.ins[0] = nullptr;
  CHECK(code(std::move(nowhere)) == Code::kInvalidArgument);
  EagerRequest cast = Place("x", &x, &x);
  cast.what.op = Collective::kBroadcast;
  cast.what.root = 1;
  CHECK(code(std::move(cast)) == Code::kInvalidArgument);
  EagerRequest exchange = Place("x", &x, nullptr);
  exchange.what.op = Collective::kAlltoall;
  exchange.what.splits = {3};
  CHECK(code(std::move(exchange)) == Code::kInvalidArgument);
  CheckUsable(lane, 0);
}

TEST(eager_only_operations_that_wait_too_long_fail) {
  EagerOptions options;
  options.stall_warning = 0.1;
  options.timeout = 1;
  for (const size_t tile : {0, 4096}) {
    Eager world(3, options, tile);
    std::barrier over(3);
    world.Each([&](EagerLane& lane, int rank) {
      Floats x(4, rank), y(4, rank);
      if (rank == 1) {
        over.arrive_and_wait();
      } else {
        const Status status = lane.Submit(Place("late", &x, &x)).value()->Wait();
        CHECK(status.code() == Code::kDeadlineExceeded);
        CHECK(Says(status, "rank 1 has not submitted allreduce 'late' (f32[4], SUM)"));
        CHECK_EQ(status.rank(), 1);
        over.arrive_and_wait();
      }
      CheckUsable(lane, rank);
      // Submitted in time now.
      CHECK(lane.Submit(Place("late", &y, &y)).value()->Wait().ok());
      CHECK(y == Floats(4, 3));
    });
  }
}

TEST(eager_an_abort_fails_pending_and_later_operations) {
  for (const size_t tile : {0, 4096}) {
    Eager world(3, {}, tile);
    // Replaces the heartbeat, which aborts the peers of a rank that fails in a round.
    for (int r = 0; r < 2; ++r) {
      Communicator* const other = world.world.ranks[1 - r].get();
      HeartbeatHooks hooks;
      hooks.on_failure = [other](const Status& why) {
        other->Abort(Status(Code::kUnavailable,
                            "rank " + std::to_string(why.rank()) + " " + why.message(),
                            why.rank()));
      };
      world.world.ranks[r]->heartbeat().SetHooks(hooks);
    }
    std::vector<Floats> data(3, Floats(4, 1));
    std::vector<std::shared_ptr<Work>> pending;
    for (int r = 0; r < 2; ++r)
      pending.push_back(world.lanes[r]->Submit(Place("x", &data[r], &data[r])).value());
    auto join = world.lanes[0]->Join().value();
    world.lanes[2].reset();
    world.world.ranks[2].reset();  // closes its links
    for (int r = 0; r < 2; ++r) {
      const Status status = pending[r]->Wait();
      CHECK(status.code() == Code::kUnavailable);
      CHECK_EQ(status.rank(), 2);
      CHECK(Says(status, "allreduce 'x' (f32[4], SUM): rank 2 "));
      const Status later =
          world.lanes[r]->Submit(Place("y", &data[r], &data[r])).status();
      CHECK(later.code() == Code::kUnavailable);
      CHECK(Says(later, "rank 2 "));
    }
    CHECK(join->Wait().code() == Code::kUnavailable);
  }
}

TEST(eager_a_peer_that_left_fails_only_operations_with_it) {
  for (const size_t tile : {0, 4096}) {
    Eager world(2, {}, tile);
    world.Each([](EagerLane& lane, int rank) { CheckUsable(lane, rank); });
    world.lanes[1].reset();
    world.world.ranks[1].reset();
    world.world.ranks[0]->OnPeerShutdown(1);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    CHECK(!world.world.ranks[0]->aborted());
    Floats x(4, 1);
    const Status status = world.lanes[0]->Submit(Place("x", &x, &x)).value()->Wait();
    CHECK(status.code() == Code::kUnavailable);
    CHECK(Says(status, "rank 1 has shut down"));
  }
}

TEST(eager_close_is_bounded_and_fails_pending_operations) {
  Eager world(2);
  Floats x(4, 1);
  auto work = world.lanes[0]->Submit(Place("x", &x, &x)).value();
  std::thread waiting([&] { CHECK(!work->Wait().ok()); });
  world.lanes[0]->Close();
  world.lanes[0]->Close();
  waiting.join();
  CHECK(Says(work->Wait(), "shut down"));
}

TEST(eager_damaged_message_ends_the_lane) {
  World world({0, 0});
  EagerLane lane(world.ranks[0], {});
  std::vector<std::string> messages;
  CHECK(world.ranks[1]->rounds().Exchange("\xff\xff\xff\xff nonsense", &messages).ok());
  Floats x(4, 1);
  auto work = lane.Submit(Place("x", &x, &x));
  const Status status = work.ok() ? work.value()->Wait() : work.status();
  CHECK(status.code() == Code::kUnavailable);
  CHECK_EQ(status.rank(), 1);
}

TEST(eager_long_messages_travel_in_rounds) {
  for (const int size : {1, 2, 3, 5, 8}) {
    for (const size_t tile : {0, 4096}) {
      World world(std::vector<int>(static_cast<size_t>(size), 0), "", 4096, 20, tile);
      world.Each([&](Communicator& c) {
        for (const size_t bytes : {0, 1, 2, 447, 448, 449, 16384, 16385, 100000}) {
          // If `bytes` is odd, even ranks send messages of half the length. Otherwise
          // three successive ranks send equal messages.
          auto text = [&](int r) {
            return bytes % 2 ? std::string(r % 2 ? bytes : bytes / 2,
                                           static_cast<char>('a' + r))
                             : std::string(bytes, static_cast<char>('a' + r / 3));
          };
          std::vector<std::string> all;
          CHECK(c.rounds().Exchange(text(c.rank()), &all).ok());
          CHECK_EQ(all.size(), static_cast<size_t>(size));
          for (int r = 0; r < size; ++r) CHECK(all[r] == text(r));
          Floats x(50, c.rank());
          Call call = AllreduceOf(&x);
          CHECK(c.Run(call).ok());  // rounds and calls take turns
        }
      });
    }
  }
}

TEST(eager_await_next_ends_at_a_call_or_a_wake) {
  for (const size_t tile : {0, 4096}) {
    World world({0, 0}, "", 4096, 20, tile);
    Communicator &a = *world.ranks[0], &b = *world.ranks[1];
    bool called = true;
    const auto soon = Clock::now() + std::chrono::milliseconds(30);
    CHECK(a.rounds().AwaitNext(soon, true, &called).ok());
    CHECK(!called && Clock::now() >= soon);
    const auto never = Clock::now() + std::chrono::seconds(100);
    std::thread waker([&a] {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      a.rounds().Wake();
    });
    CHECK(a.rounds().AwaitNext(never, true, &called).ok());
    CHECK(!called);
    waker.join();
    std::vector<std::string> of_a, of_b;
    std::thread peer([&] { CHECK(b.rounds().Exchange("b", &of_b).ok()); });
    CHECK(a.rounds().AwaitNext(never, true, &called).ok());
    CHECK(called);
    CHECK(a.rounds().Exchange("a", &of_a).ok());
    peer.join();
    CHECK(of_a == of_b);
    CHECK(Clock::now() < never);
  }
}

}  // namespace
}  // namespace ringjax
