// The eager lane with threads as ranks: orders, operations, joins, and use after
// failures. Also run under sanitizers.
#include <cstring>
#include <numeric>
#include <random>

#include "check.h"
#include "eager_world.h"
#include "engine/eager/lane.h"

namespace ringjax {
namespace {

using testing_eager::Eager;
using testing_eager::Floats;
using testing_eager::Place;

std::string Name(size_t i) { return std::string("t").append(std::to_string(i)); }

TEST(eager_allreduce_with_and_without_a_segment) {
  for (const int size : {1, 2, 3, 5}) {
    for (const size_t tile : {0, 4096}) {
      Eager world(size, {}, tile);
      world.Each([&](EagerLane& lane, int rank) {
        for (int i = 0; i < 20; ++i) {
          // Lengths for inline data and for several tiles.
          Floats x(1 + 700 * i, rank + i), y(x.size());
          auto work = lane.Submit(Place("x", &x, &y));
          CHECK(work.ok());
          CHECK(work.value()->Wait().ok());
          const float sum = size * (size - 1) / 2 + size * i;
          CHECK(y == Floats(x.size(), sum));
        }
      });
    }
  }
}

// A rank polls an operation so often that some polls happen exactly when it ends.
TEST(eager_polled_at_any_moment) {
  Eager world(2);
  world.Each([](EagerLane& lane, int rank) {
    for (int i = 0; i < 200; ++i) {
      Floats x(1, rank + i), y(1);
      auto work = lane.Submit(Place("x", &x, &y));
      CHECK(work.ok());
      while (!work.value()->settled()) continue;
      CHECK(work.value()->status().ok());
      CHECK_EQ(y[0], 1.0f + 2 * i);
    }
  });
}

TEST(eager_any_order_from_any_thread) {
  constexpr int kThreads = 3, kEach = 40, kSteps = 3;
  for (const size_t tile : {0, 4096}) {
    Eager world(4, {}, tile);
    world.Each([&](EagerLane& lane, int rank) {
      std::vector<std::thread> threads;
      for (int t = 0; t < kThreads; ++t)
        threads.emplace_back([&, t] {
          std::mt19937 random(rank * 100 + t);
          std::vector<int> order(kEach);
          std::iota(order.begin(), order.end(), t * kEach);
          std::vector<Floats> data(kEach);
          for (int step = 0; step < kSteps; ++step) {
            std::shuffle(order.begin(), order.end(), random);
            std::vector<std::shared_ptr<Work>> works(kEach);
            for (int i : order) {
              Floats& x = data[i % kEach];
              x.assign(1 + i, rank + i + step);
              auto work = lane.Submit(Place(std::to_string(i), &x, &x));
              CHECK(work.ok());
              works[i % kEach] = work.value();
            }
            for (int i : order) {
              CHECK(works[i % kEach]->Wait().ok());
              const float sum = 6 + 4 * (i + step);
              CHECK(data[i % kEach] == Floats(1 + i, sum));
            }
          }
        });
      for (auto& t : threads) t.join();
    });
    CHECK(world.lanes[0]->stats().cached > 0);
    CHECK_EQ(world.lanes[0]->stats().submissions, uint64_t{kThreads * kEach * kSteps});
  }
}

TEST(eager_operations_that_are_ready_together_are_fused) {
  EagerOptions options;
  options.cycle_seconds = 0.3;  // long enough to submit all of them
  Eager world(2, options);
  world.Each([&](EagerLane& lane, int rank) {
    std::vector<Floats> data(100, Floats(10, rank));
    std::vector<std::shared_ptr<Work>> works;
    for (size_t i = 0; i < data.size(); ++i)
      works.push_back(lane.Submit(Place(Name(i), &data[i], &data[i])).value());
    for (auto& t : works) CHECK(t->Wait().ok());
    for (auto& d : data) CHECK(d == Floats(10, 1));
    CHECK(lane.stats().calls < 20);
    CHECK_EQ(lane.stats().fused, 100u);
  });
}

TEST(eager_groups_complete_as_one) {
  Eager world(3);
  world.Each([&](EagerLane& lane, int rank) {
    Floats a(5, rank), b(7, 2 * rank);
    EagerRequest request = Place("group", &a, &a);
    testing_eager::Add(&request, &b, &b);
    CHECK(lane.Submit(std::move(request)).value()->Wait().ok());
    CHECK(a == Floats(5, 3));
    CHECK(b == Floats(7, 6));
  });
}

TEST(eager_all_operations) {
  for (const int size : {1, 2, 3, 5}) {
    for (const size_t tile : {0, 4096}) {
      Eager world(size, {}, tile);
      world.Each([&](EagerLane& lane, int rank) {
        const int root = size - 1;
        Floats x(3, rank);
        EagerRequest cast = Place("b", &x, &x);
        cast.what.op = Collective::kBroadcast;
        cast.what.root = root;
        CHECK(lane.Submit(std::move(cast)).value()->Wait().ok());
        CHECK(x == Floats(3, root));

        // Rank r has r + 1 rows of two.
        Floats rows(2 * (rank + 1), rank);
        EagerRequest gather = Place("g", &rows, nullptr);
        gather.what.op = Collective::kAllgather;
        gather.what.tensors[0].dims = {rank + 1, 2};
        auto gathered = lane.Submit(std::move(gather)).value();
        CHECK(gathered->Wait().ok());
        Floats expected;
        for (int r = 0; r < size; ++r)
          expected.insert(expected.end(), 2 * (r + 1), static_cast<float>(r));
        const Output& all = gathered->outputs()[0];
        CHECK(all.dims == (std::vector<int64_t>{size * (size + 1) / 2, 2}));
        CHECK_EQ(all.received[size - 1], int64_t{size});
        CHECK(std::memcmp(all.memory.get(), expected.data(), expected.size() * 4) == 0);
        CHECK_EQ(reinterpret_cast<uintptr_t>(all.memory.get()) % 64, 0u);

        // P ranks share 2 P + 1 rows, so rank 0 receives one row more than the others.
        Floats parts(2 * size + 1), mine(rank == 0 ? 3 : 2);
        std::iota(parts.begin(), parts.end(), 0.0f);
        EagerRequest scatter = Place("s", &parts, &mine);
        scatter.what.op = Collective::kReducescatter;
        CHECK(lane.Submit(std::move(scatter)).value()->Wait().ok());
        const int first = rank == 0 ? 0 : 2 * rank + 1;
        for (size_t i = 0; i < mine.size(); ++i)
          CHECK_EQ(mine[i], static_cast<float>(size * (first + static_cast<int>(i))));

        // Rank r sends r + 1 rows to every rank, first with splits and then as equal
        // parts.
        for (const bool equal : {false, true}) {
          Floats out(static_cast<size_t>(size * (rank + 1)), rank);
          EagerRequest exchange = Place(equal ? "e" : "a", &out, nullptr);
          exchange.what.op = Collective::kAlltoall;
          if (!equal) exchange.what.splits.assign(size, rank + 1);
          auto exchanged = lane.Submit(std::move(exchange)).value();
          CHECK(exchanged->Wait().ok());
          expected.clear();
          for (int r = 0; r < size; ++r)
            expected.insert(expected.end(), r + 1, static_cast<float>(r));
          const Output& result = exchanged->outputs()[0];
          CHECK_EQ(result.dims[0], static_cast<int64_t>(expected.size()));
          CHECK(std::memcmp(result.memory.get(), expected.data(),
                            expected.size() * 4) == 0);
        }

        EagerRequest barrier;
        barrier.what.op = Collective::kBarrier;
        barrier.what.name = "barrier";
        CHECK(lane.Submit(std::move(barrier)).value()->Wait().ok());
      });
    }
  }
}

TEST(eager_a_joined_rank_changes_no_result) {
  struct Case {
    ReduceOp op;
    float expected;
  };
  // Three ranks have 2, 3 and 4. The first rank has joined, so 3 and 4 are reduced.
  const Case cases[] = {{ReduceOp::kSum, 7},
                        {ReduceOp::kAverage, 7.0f / 3},
                        {ReduceOp::kMin, 3},
                        {ReduceOp::kMax, 4},
                        {ReduceOp::kProduct, 12}};
  Eager world(3);
  world.Each([&](EagerLane& lane, int rank) {
    for (int turn = 0; turn < 2; ++turn) {
      if (rank == 0) {
        auto work = lane.Join().value();
        CHECK(!lane.Join().ok());
        CHECK(work->Wait().ok());
        CHECK(work->last_joined() == 1 || work->last_joined() == 2);
        continue;
      }
      for (const Case& c : cases) {
        Floats x(4, rank + 2), y(4);
        EagerRequest request = Place("r", &x, &y);
        request.what.reduce_op = c.op;
        CHECK(lane.Submit(std::move(request)).value()->Wait().ok());
        CHECK(y == Floats(4, c.expected));
      }
      Floats rows(2, rank);
      EagerRequest gather = Place("g", &rows, nullptr);
      gather.what.op = Collective::kAllgather;
      auto gathered = lane.Submit(std::move(gather)).value();
      CHECK(gathered->Wait().ok());
      CHECK_EQ(gathered->outputs()[0].dims[0], int64_t{4});
      CHECK_EQ(gathered->outputs()[0].received[0], int64_t{0});

      Floats out(3, rank);
      EagerRequest exchange = Place("a", &out, nullptr);
      exchange.what.op = Collective::kAlltoall;
      auto exchanged = lane.Submit(std::move(exchange)).value();
      CHECK(exchanged->Wait().ok());
      CHECK_EQ(exchanged->outputs()[0].dims[0], int64_t{2});

      Floats parts(5, rank), mine(rank == 1 ? 2 : 1);
      EagerRequest scatter = Place("s", &parts, &mine);
      scatter.what.op = Collective::kReducescatter;
      CHECK(lane.Submit(std::move(scatter)).value()->Wait().ok());
      CHECK(mine == Floats(mine.size(), 3));

      Floats x(2, rank);
      EagerRequest cast = Place("b", &x, &x);
      cast.what.op = Collective::kBroadcast;
      cast.what.root = 0;
      const Status status = lane.Submit(std::move(cast)).value()->Wait();
      CHECK(!status.ok());
      CHECK(status.message().find("root rank 0") != std::string::npos);
      CHECK(lane.Join().value()->Wait().ok());
    }
    // After the join, operations work as before.
    Floats x(4, rank), y(4);
    CHECK(lane.Submit(Place("x", &x, &y)).value()->Wait().ok());
    CHECK(y == Floats(4, 3));
  });
}

TEST(eager_ten_thousand_in_flight) {
  constexpr int kMany = testing_eager::kSlow ? 2000 : 10000;
  Eager world(2);
  world.Each([&](EagerLane& lane, int rank) {
    std::vector<Floats> data(size_t{kMany}, Floats(3, rank + 1));
    std::vector<std::shared_ptr<Work>> works;
    for (int i = 0; i < kMany; ++i) {
      const auto k = static_cast<size_t>(rank == 0 ? i : kMany - 1 - i);
      works.push_back(lane.Submit(Place(Name(k), &data[k], &data[k])).value());
    }
    for (auto& t : works) CHECK(t->Wait().ok());
    for (auto& d : data) CHECK(d == Floats(3, 3));
    std::vector<void*> ended = lane.ended_tasks().Take();
    CHECK(ended.empty());  // no submission had a `keep`
  });
}

TEST(eager_kept_objects_are_returned_after_the_end) {
  Eager world(2);
  world.Each([&](EagerLane& lane, int rank) {
    int kept[2];
    Floats x(1, 1), y(1, 1);
    EagerRequest a = Place("a", &x, &x), b = Place("b", &y, &y);
    a.keep = &kept[0];
    b.keep = &kept[1];
    auto first = lane.Submit(std::move(a)).value();
    CHECK(first->Wait().ok());
    CHECK(lane.ended_tasks().any());
    CHECK(lane.ended_tasks().Take() == std::vector<void*>{&kept[0]});
    if (rank == 0) {
      auto second = lane.Submit(std::move(b)).value();
      CHECK(lane.ended_tasks().Take().empty());
      lane.Close();
      CHECK(!second->Wait().ok());
      CHECK(lane.ended_tasks().Take() == std::vector<void*>{&kept[1]});
    }
  });
}

}  // namespace
}  // namespace ringjax
