// Short operations whose data are piggybacked on the round of their submission, and
// operations for which that only seems possible.
#include <chrono>
#include <numeric>

#include "check.h"
#include "eager_world.h"
#include "engine/eager/negotiation_message.h"

namespace ringjax {
namespace {

using testing_eager::Eager;
using testing_eager::Floats;
using testing_eager::Place;

Status Do(EagerLane& lane, EagerRequest request,
          std::vector<Output>* outputs = nullptr) {
  request.waits = true;
  auto work = lane.Submit(std::move(request));
  if (!work.ok()) return work.status();
  const Status status = work.value()->Wait();
  if (outputs != nullptr) *outputs = work.value()->outputs();
  return status;
}

// Returns two elements for each rank, which begin at 10 r.
Floats Own(int rank, int size) {
  Floats x(static_cast<size_t>(2 * size));
  std::iota(x.begin(), x.end(), static_cast<float>(10 * rank));
  return x;
}

void Allreduce(EagerLane& lane, int rank, int size, ReduceOp op) {
  const Floats own = Own(rank, size);
  Floats in = own, out(own.size());
  EagerRequest request = Place("sum", &in, &out);
  request.what.reduce_op = op;
  request.what.postscale = 0.5;
  CHECK(Do(lane, request).ok());
  CHECK(in == own);
  for (size_t i = 0; i < out.size(); ++i) {
    const auto first = static_cast<float>(i), last = first + 10.0f * (size - 1);
    const float sum = size * (first + last) / 2;
    const float want = op == ReduceOp::kMax       ? last
                       : op == ReduceOp::kAverage ? sum / static_cast<float>(size)
                                                  : sum;
    CHECK_EQ(out[i], want / 2);
  }
}

void Broadcast(EagerLane& lane, int rank, int size, int root) {
  Floats x = Own(rank, size);
  EagerRequest request = Place("cast", &x, &x);
  request.what.op = Collective::kBroadcast;
  request.what.root = root;
  CHECK(Do(lane, request).ok());
  CHECK(x == Own(root, size));
}

// Checks an allgather in which ranks have different numbers of rows.
void Allgather(EagerLane& lane, int rank, int size) {
  const auto of = [&](int r) {
    Floats x = Own(r, size);
    x.resize(static_cast<size_t>(r));
    return x;
  };
  Floats x = of(rank), want;
  for (int r = 0; r < size; ++r)
    for (float value : of(r)) want.push_back(value);
  EagerRequest request = Place("gather", &x, nullptr);
  request.what.op = Collective::kAllgather;
  std::vector<Output> outputs;
  CHECK(Do(lane, request, &outputs).ok());
  CHECK_EQ(outputs[0].dims[0], static_cast<int64_t>(want.size()));
  if (want.empty()) return;
  CHECK(std::memcmp(outputs[0].memory.get(), want.data(), want.size() * 4) == 0);
}

// Checks a reducescatter with one more row for rank 0.
void Reducescatter(EagerLane& lane, int rank, int size) {
  Floats x(static_cast<size_t>(size + 1));
  std::iota(x.begin(), x.end(), static_cast<float>(10 * rank));
  const Floats own = x;
  Floats out(rank == 0 ? 2 : 1, -1);
  EagerRequest request = Place("scatter", &x, &out);
  request.what.op = Collective::kReducescatter;
  request.what.reduce_op = ReduceOp::kSum;
  CHECK(Do(lane, request).ok());
  CHECK(x == own);
  for (size_t i = 0; i < out.size(); ++i) {
    const auto at = static_cast<float>(i + static_cast<size_t>(rank + (rank > 0)));
    CHECK_EQ(out[i], size * (2 * at + 10.0f * (size - 1)) / 2);
  }
}

// Checks an alltoall that sends two rows to each rank. `room`: the caller provides the
// memory of the result, which is never the memory of the input.
void Alltoall(EagerLane& lane, int rank, int size, bool room) {
  Floats x = Own(rank, size), out(x.size()), want;
  for (int r = 0; r < size; ++r)
    for (int i = 0; i < 2; ++i)
      want.push_back(static_cast<float>(10 * r + 2 * rank + i));
  EagerRequest request = Place("all", &x, room ? &out : nullptr);
  request.what.op = Collective::kAlltoall;
  if (room) request.rooms = {out.size() * 4};
  std::vector<Output> outputs;
  CHECK(Do(lane, request, &outputs).ok());
  CHECK(x == Own(rank, size));
  CHECK(std::memcmp(outputs[0].memory.get(), want.data(), want.size() * 4) == 0);
}

TEST(eager_piggybacked_data_are_the_result) {
  for (const int size : {1, 2, 3, 5}) {
    for (const size_t tile : {0, 4096}) {
      Eager world(size, {}, tile);
      world.Each([&](EagerLane& lane, int rank) {
        for (int i = 0; i < 40; ++i) {
          Allreduce(lane, rank, size, ReduceOp::kSum);
          Allreduce(lane, rank, size, ReduceOp::kAverage);
          Allreduce(lane, rank, size, ReduceOp::kMax);
          Broadcast(lane, rank, size, i % size);
          Allgather(lane, rank, size);
          Alltoall(lane, rank, size, i % 2 == 0);
          Reducescatter(lane, rank, size);
        }
      });
      const EagerStats first = world.lanes[0]->stats();
      for (auto& lane : world.lanes)
        CHECK_EQ(lane->stats().piggybacked, first.piggybacked);
      CHECK_EQ(first.piggybacked > 0, size > 1 && tile > 0);
      CHECK_EQ(first.calls, 280u);
    }
  }
}

// A call is kept for the next operation, which has other memory, may have another
// description, and may be another operation on one of the ranks.
TEST(eager_repetitions_have_memory_of_their_own) {
  for (const size_t tile : {0, 4096}) {
    Eager world(2, {}, tile);
    world.Each([&](EagerLane& lane, int rank) {
      std::vector<Floats> outs(40), want(40);
      for (size_t i = 0; i < outs.size(); ++i) {
        Floats in(i % 16 < 8 ? 4 : 6, static_cast<float>(i));
        outs[i].resize(in.size());
        EagerRequest request = Place("again", &in, &outs[i]);
        const bool max = i % 4 == 3;
        if (max) request.what.reduce_op = ReduceOp::kMax;
        CHECK(Do(lane, request).ok());
        want[i].assign(in.size(), (max ? 1.0f : 2.0f) * static_cast<float>(i));
        Floats other(rank == 0 ? 6 : 5), out(other.size());
        if (i % 5 == 4)
          CHECK(Do(lane, Place("again", &other, &out)).code() == Code::kMismatch);
      }
      CHECK(outs == want);
    });
    CHECK_EQ(world.lanes[0]->stats().piggybacked > 0, tile > 0);
  }
}

TEST(eager_long_values_and_groups_are_not_piggybacked) {
  Eager world(2);
  world.Each([&](EagerLane& lane, int) {
    for (int i = 0; i < 20; ++i) {
      Floats x(2049, 1), y(3, 1);
      CHECK(Do(lane, Place("long", &x, &x)).ok());
      CHECK(x == Floats(x.size(), 2));
      x.assign(5, 1);
      EagerRequest group = Place("group", &x, &x);
      testing_eager::Add(&group, &y, &y);
      CHECK(Do(lane, group).ok());
      CHECK(x == Floats(5, 2) && y == Floats(3, 2));
    }
  });
  for (auto& lane : world.lanes) CHECK_EQ(lane->stats().piggybacked, 0u);
}

// Rank 0 sends the values of one operation, but another operation, which rank 0 has
// submitted before, becomes ready.
TEST(eager_values_of_another_operation_are_not_used) {
  Eager world(2);
  std::atomic<int> here{0};
  world.Each([&](EagerLane& lane, int rank) {
    for (int i = 0; i < 100; ++i) {
      Floats early(4, 1 + static_cast<float>(rank)), late(4, 10);
      const auto rounds = lane.stats().rounds;
      std::shared_ptr<Work> first;
      if (rank == 0) {
        first = lane.Submit(Place("early", &early, &early)).value();
        while (lane.stats().rounds == rounds) std::this_thread::yield();
      }
      for (++here; here < 2 * (i + 1);) std::this_thread::yield();
      auto second = lane.Submit(rank == 0 ? Place("late", &late, &late)
                                          : Place("early", &early, &early));
      if (rank == 1) {
        CHECK(second.value()->Wait().ok());
        CHECK(Do(lane, Place("late", &late, &late)).ok());
      } else {
        CHECK(first->Wait().ok());
        CHECK(second.value()->Wait().ok());
      }
      CHECK(early == Floats(4, 3));
      CHECK(late == Floats(4, 20));
    }
  });
}

TEST(eager_values_of_different_operations_fail_only_these) {
  Eager world(3);
  world.Each([&](EagerLane& lane, int rank) {
    for (int i = 0; i < 20; ++i) {
      Floats x(rank == 1 ? 3 : 4, 1), y(4, 1);
      CHECK(Do(lane, Place("x", &x, &x)).code() == Code::kMismatch);
      CHECK(Do(lane, Place("y", &y, &y)).ok());
      CHECK(y == Floats(4, 3));
    }
  });
}

// The other rank submits two operations at once, so it sends no values.
TEST(eager_values_are_ignored_if_a_rank_sent_none) {
  World world({0, 0});
  EagerLane lane(world.ranks[0], {});
  Floats x(4, 1), more(4, 5), theirs(4, 2);
  NegotiationWriter writer;
  writer.Description(Place("x", &theirs, &theirs).what);
  writer.Description(Place("more", &more, &more).what);
  auto work = lane.Submit(Place("x", &x, &x)).value();
  std::vector<std::string> messages;
  CHECK(world.ranks[1]->rounds().Exchange(writer.Seal(0), &messages).ok());
  Call call = AllreduceOf(&theirs);
  call.name = "x";
  CHECK(world.ranks[1]->Run(call).ok());
  CHECK(work->Wait().ok());
  CHECK(x == Floats(4, 3) && theirs == Floats(4, 3));
  CHECK_EQ(lane.stats().piggybacked, 0u);
}

TEST(eager_values_that_contradict_the_message_are_damage) {
  World world({0, 0});
  EagerLane lane(world.ranks[0], {});
  Floats x(4, 1), wrong(3, 1);
  Submission what = Place("x", &x, &x).what;
  NegotiationWriter writer;
  writer.Description(what);
  Piggyback piggyback;
  piggyback.given = true;
  piggyback.own = std::as_bytes(std::span(wrong));
  auto work = lane.Submit(Place("x", &x, &x)).value();
  std::vector<std::string> messages;
  CHECK(world.ranks[1]->rounds().Exchange(writer.Seal(0), &messages, &piggyback).ok());
  CHECK(piggyback.whole);
  const Status status = work->Wait();
  CHECK(status.message().find("rank 1 has told of other bytes than it gave") !=
        std::string::npos);
  CHECK_EQ(status.rank(), 1);
  world.ranks[1]->Abort(Status(Code::kUnavailable, "has ended", 1));
}

}  // namespace
}  // namespace ringjax
