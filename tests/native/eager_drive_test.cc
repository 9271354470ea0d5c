// Callers that wait do the work of the lane themselves: alone, beside other callers,
// and while the lane is aborted.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>

#include "check.h"
#include "eager_world.h"
#include "engine/call/waiter.h"

namespace ringjax {
namespace {

using testing_eager::Eager;
using testing_eager::Floats;
using testing_eager::Place;

Status Sum(EagerLane& lane, const std::string& name, Floats* x) {
  EagerRequest request = Place(name, x, x);
  request.waits = true;
  auto work = lane.Submit(std::move(request));
  return work.ok() ? work.value()->Wait() : work.status();
}

TEST(eager_callers_that_wait_do_the_work) {
  for (const int size : {1, 2, 3, 5}) {
    for (const size_t tile : {0, 4096}) {
      Eager world(size, {}, tile);
      const auto all_did = [&] {
        return std::all_of(world.lanes.begin(), world.lanes.end(),
                           [](auto& lane) { return lane->stats().driven > 0; });
      };
      // On busy cores, the thread of a lane may be faster than the caller for a while.
      for (int round = 0; round < 50 && !all_did(); ++round)
        world.Each([&](EagerLane& lane, int) {
          for (int i = 0; i < 200; ++i) {
            Floats x(static_cast<size_t>(1 + i), 1);
            CHECK(Sum(lane, "x", &x).ok());
            CHECK(x == Floats(x.size(), static_cast<float>(size)));
          }
        });
      CHECK(all_did());
    }
  }
}

TEST(eager_held_operations_are_sent_together) {
  for (const int size : {1, 2, 3, 5}) {
    Eager world(size);
    world.Each([&](EagerLane& lane, int) {
      for (int i = 0; i < 20; ++i) {
        std::vector<Floats> all(30, Floats(10, 1));
        std::vector<std::shared_ptr<Work>> works;
        lane.Hold();
        for (size_t k = 0; k < all.size(); ++k)
          works.push_back(
              lane.Submit(Place(std::to_string(k), &all[k], &all[k])).value());
        if (i % 4 == 0) {  // releases the held operations, so a wait can end
          lane.Hurry();
          CHECK(works[0]->Wait().ok());
        }
        lane.Release();
        for (const auto& work : works) CHECK(work->Wait().ok());
        for (const Floats& x : all) CHECK_EQ(x[9], static_cast<float>(size));
      }
    });
    // Without holding, there would be several hundred calls.
    for (auto& lane : world.lanes) CHECK(lane->stats().calls < 20 * 8);
  }
}

TEST(eager_waiting_callers_work_beside_others) {
  for (const size_t tile : {0, 4096}) {
    Eager world(3, {}, tile);
    world.Each([&](EagerLane& lane, int) {
      std::vector<std::thread> threads;
      for (int t = 0; t < 3; ++t)
        threads.emplace_back([&lane, t] {
          for (int i = 0; i < 100; ++i) {
            const std::string name = std::to_string(t);
            Floats x(3, 1), y(3, 2);
            auto beside = lane.Submit(Place(name + " beside", &y, &y)).value();
            if (t < 2) CHECK(Sum(lane, name, &x).ok());
            CHECK(beside->Wait().ok());
            CHECK(x == Floats(3, t < 2 ? 3 : 1));
            CHECK(y == Floats(3, 6));
          }
        });
      for (auto& t : threads) t.join();
    });
  }
}

// The thread of the lane has left the work to callers when one submits without waiting.
TEST(eager_the_thread_serves_callers_that_do_not_wait) {
  Eager world(2);
  world.Each([&](EagerLane& lane, int) {
    for (int i = 0; i < 50; ++i) {
      Floats x(1, 1), y(1, 1);
      CHECK(Sum(lane, "x", &x).ok());
      auto work = lane.Submit(Place("y", &y, &y)).value();
      const auto limit = Clock::now() + std::chrono::seconds(20);
      while (!work->done() && Clock::now() < limit) std::this_thread::yield();
      CHECK(work->done());
      CHECK(y == Floats(1, 2));
    }
  });
}

TEST(eager_a_caller_of_a_late_rank_leaves_the_work_to_the_thread) {
  Eager world(2);
  world.Each([&](EagerLane& lane, int rank) {
    for (int i = 0; i < 3; ++i) {
      Floats x(1, 1);
      CHECK(Sum(lane, "x", &x).ok());
      // Sleep longer than a caller spins.
      if (rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(150));
    }
    if (rank == 0) return;
    auto join = lane.Join();
    CHECK(join.ok());
  });
  CHECK(world.lanes[0]->Join().value()->Wait().ok());
}

TEST(eager_an_abort_ends_callers_that_do_the_work) {
  for (const size_t tile : {0, 4096}) {
    Eager world(2, {}, tile);
    std::atomic<int> going{2};
    std::vector<std::thread> threads;
    for (auto& lane : world.lanes)
      threads.emplace_back([&lane, &going] {
        Floats x(1000, 1);
        int done = 0;
        Status status;
        while ((status = Sum(*lane, "x", &x)).ok())
          if (++done == 100) --going;
        CHECK(status.code() == Code::kUnavailable);
        CHECK(status.message().find("allreduce 'x'") != std::string::npos);
      });
    while (going > 0) std::this_thread::yield();
    world.lanes[0]->Close();
    world.lanes[1]->Abort(Status(Code::kUnavailable, "rank 0 has gone", 0));
    for (auto& t : threads) t.join();
  }
}

TEST(eager_a_signal_handler_cannot_wait_for_what_it_interrupts) {
  const auto gate = std::make_shared<Gate>();
  Work work(gate);
  {
    const Gate::Driver driver(gate.get());
    CHECK(work.Wait().code() == Code::kFailedPrecondition);
    // A caller that drives one lane may wait for another lane.
    CHECK(!std::make_shared<Gate>()->IsDriver());
    CHECK(Gate::IsDriving());
  }
  CHECK(!Gate::IsDriving());
}

TEST(waits_of_a_driver_are_interrupted_only_while_nothing_moves) {
  static std::atomic<int> asked{0};
  asked = 0;
  World world({0, 0});
  const auto before = interrupt_check.exchange([] { return ++asked > 0; });
  const auto start = Clock::now();
  std::vector<std::string> messages;
  Status status;
  {
    const InterruptsAfter interrupts(0.5);
    status = world.ranks[0]->rounds().Exchange("message",
                                               &messages);  // rank 1 does not take part
  }
  interrupt_check.store(before);
  CHECK(status.code() == Code::kCancelled || world.ranks[0]->aborted());
  CHECK(Clock::now() - start >= std::chrono::milliseconds(500));
  CHECK_EQ(asked.load(), 1);
}

}  // namespace
}  // namespace ringjax
