// The shared segment: results of inline data and of tiles, equal bits on all ranks, and
// peers that write false counters, leave, or are late.
#include "transport/shared_segment.h"

#include <time.h>

#include <chrono>
#include <cstring>
#include <random>
#include <thread>

#include "check.h"
#include "engine/call/tiles.h"
#include "link_ends.h"
#include "local_world.h"

namespace ringjax {
namespace {

constexpr size_t kTile = 8192;

struct Options {
  ReduceOp op = ReduceOp::kSum;
  int wire = -1;
  double prescale = 1, postscale = 1;
  bool in_place = true;
};

// Element i of every tensor of a rank.
float Value(int rank, size_t i) {
  return static_cast<float>((i * 7 + static_cast<size_t>(rank) * 3) % 13);
}

// Checks an allreduce of tensors of `counts` elements. The values are small integers,
// so that sums in any order, and in bf16, are equal.
void CheckAllreduce(Communicator& c, const std::vector<size_t>& counts,
                    const Options& o) {
  const int p = c.size();
  std::vector<std::vector<float>> in, out;
  for (const size_t n : counts) {
    in.emplace_back(n);
    out.emplace_back(n, -1.0f);
    for (size_t i = 0; i < n; ++i) in.back()[i] = Value(c.rank(), i);
  }
  Call call;
  call.op = Collective::kAllreduce;
  call.reduce_op = o.op;
  call.wire = o.wire;
  call.prescale = o.prescale;
  call.postscale = o.postscale;
  for (size_t k = 0; k < counts.size(); ++k)
    call.tensors.push_back(Floats(&in[k], o.in_place ? &in[k] : &out[k]));
  CHECK(c.Run(call).ok());
  for (size_t k = 0; k < counts.size(); ++k)
    for (size_t i = 0; i < counts[k]; ++i) {
      double want = o.op == ReduceOp::kProduct ? 1 : 0;
      for (int r = 0; r < p; ++r) {
        const double v = Value(r, i) * o.prescale;
        if (o.op == ReduceOp::kProduct) want *= v;
        if (o.op == ReduceOp::kMax) want = std::max(want, v);
        if (o.op == ReduceOp::kSum || o.op == ReduceOp::kAverage) want += v;
      }
      want *= o.postscale;
      if (o.op == ReduceOp::kAverage) want /= p;
      const float got = o.in_place ? in[k][i] : out[k][i];
      if (std::abs(got - want) > 1e-5 * std::abs(want) + 1e-6) {
        CHECK_EQ(got, static_cast<float>(want));
        return;
      }
      if (!o.in_place && in[k][i] != Value(c.rank(), i)) {
        CHECK_EQ(in[k][i], Value(c.rank(), i));
        return;
      }
    }
}

void Allreduces() {
  const int bf16 = static_cast<int>(DType::kBF16);
  for (const size_t p : {2, 3, 5}) {
    World world(std::vector<int>(p, 0), "", 4096, 20, kTile);
    world.Each([&](Communicator& c) {
      for (const size_t n : {1, 31, 4096, 4097, 5000, 40000, 123457})
        for (const bool in_place : {true, false}) {
          CheckAllreduce(c, {n}, {.in_place = in_place});
          CheckAllreduce(c, {n}, {.op = ReduceOp::kAverage, .in_place = in_place});
          CheckAllreduce(c, {n}, {.op = ReduceOp::kMax, .in_place = in_place});
          CheckAllreduce(
              c, {n},
              {.wire = bf16, .prescale = 2, .postscale = 0.5, .in_place = in_place});
        }
      CheckAllreduce(c, {3000}, {.op = ReduceOp::kProduct, .prescale = 0.5});
      CheckAllreduce(c, {3, 0, 70000, 1, 1, 2047, 65, 9000}, {});
      CheckAllreduce(c, std::vector<size_t>(900, 7), {.op = ReduceOp::kAverage});
    });
    const OpStats stats = world.ranks[0]->log().stats().at("allreduce");
    CHECK_EQ(stats.algorithms.size(), size_t{1});
    CHECK_EQ(stats.algorithms.at("shared"), stats.calls);
  }
}
TEST(AllreduceOverASegment) { Allreduces(); }
TEST(AllreduceOverASegmentByNonTemporalStores) {
  const Override<bool> past(&always_non_temporal, true);
  Allreduces();
}

// The results are longer than the caches, and are not in place.
TEST(LongAllreduceOverASegment) {
  for (const bool past : {false, true}) {
    const Override<bool> how(&always_non_temporal, past);
    World world({0, 0, 0}, "", 4096, 20, 1 << 20);
    world.Each(
        [](Communicator& c) { CheckAllreduce(c, {2'100'003}, {.in_place = false}); });
  }
}

// Checks a reducescatter. Rank r receives rows[r] rows of `width` elements.
void CheckReducescatter(Communicator& c, const std::vector<int64_t>& rows,
                        int64_t width, const Options& o) {
  int64_t all = 0, before = 0;
  for (int r = 0; r < c.size(); ++r) {
    if (r < c.rank()) before += rows[static_cast<size_t>(r)];
    all += rows[static_cast<size_t>(r)];
  }
  const int64_t mine = rows[static_cast<size_t>(c.rank())];
  std::vector<float> in(static_cast<size_t>(all * width)),
      out(static_cast<size_t>(mine * width), -1.0f);
  for (size_t i = 0; i < in.size(); ++i) in[i] = Value(c.rank(), i);
  Call call;
  call.op = Collective::kReducescatter;
  call.reduce_op = o.op;
  call.wire = o.wire;
  call.prescale = o.prescale;
  call.postscale = o.postscale;
  call.rows = rows;
  call.tensors.push_back(
      {DType::kF32, {all, width}, in.data(), out.data(), out.size() * 4});
  CHECK(c.Run(call).ok());
  for (size_t i = 0; i < out.size(); ++i) {
    const size_t at = static_cast<size_t>(before * width) + i;
    double want = 0;
    for (int r = 0; r < c.size(); ++r) {
      const double v = Value(r, at) * o.prescale;
      want = o.op == ReduceOp::kMax ? std::max(want, v) : want + v;
    }
    want *= o.postscale / (o.op == ReduceOp::kAverage ? c.size() : 1);
    if (std::abs(out[i] - want) > 1e-5 * want + 1e-6)
      return CHECK_EQ(out[i], static_cast<float>(want));
  }
  for (size_t i = 0; i < in.size(); ++i)
    if (in[i] != Value(c.rank(), i)) return CHECK_EQ(in[i], Value(c.rank(), i));
}

// Reducescatters of inline data, one tile and many tiles, between allreduces that
// advance the cursor by any amount.
void Reducescatters() {
  for (const int p : {2, 3, 5}) {
    World world(std::vector<int>(static_cast<size_t>(p), 0), "", 4096, 20, kTile);
    world.Each([&](Communicator& c) {
      for (const int64_t n : {0, 1, 3, 70, 1000, 9001}) {
        const std::vector<int64_t> even(static_cast<size_t>(p), n);
        std::vector<int64_t> uneven, one(static_cast<size_t>(p), 0);
        for (int r = 0; r < p; ++r) uneven.push_back(r * n / 3);
        one[1] = n;
        for (const auto& rows : {even, uneven, one}) {
          CheckReducescatter(c, rows, 1, {});
          CheckReducescatter(c, rows, 7, {.op = ReduceOp::kAverage, .prescale = 2});
          CheckReducescatter(c, rows, 3, {.op = ReduceOp::kMax});
          CheckReducescatter(c, rows, 5,
                             {.wire = static_cast<int>(DType::kBF16),
                              .prescale = 2,
                              .postscale = 0.5});
        }
        CheckAllreduce(c, {static_cast<size_t>(n) + 1}, {});
      }
    });
    const OpStats stats = world.ranks[0]->log().stats().at("reducescatter");
    CHECK_EQ(stats.algorithms.size(), size_t{1});
    CHECK_EQ(stats.algorithms.at("shared"), stats.calls);
  }
}
TEST(ReducescatterOverASegment) { Reducescatters(); }
TEST(ReducescatterOverASegmentByNonTemporalStores) {
  const Override<bool> past(&always_non_temporal, true);
  Reducescatters();
}

// There are more ranks than cache lines in a tile.
TEST(ReducescatterOfMoreRanksThanATileHasLines) {
  constexpr size_t kRanks = 4096 / kLineBytes + 1;
  World world(std::vector<int>(kRanks, 0), "", 4096, 60, 4096);
  world.Each([&](Communicator& c) {
    std::vector<int64_t> rows(kRanks, 40);
    rows[3] = 0;
    CheckReducescatter(c, rows, 2, {});
    CheckAllreduce(c, {5000}, {});
  });
}

TEST(ElementTypesOfEverySizeOverASegment) {
  World world({0, 0, 0}, "", 4096, 20, kTile);
  world.Each([](Communicator& c) {
    for (const int64_t n : {5, 3000, 30000}) {
      std::vector<uint8_t> bytes(n, 3);
      std::vector<uint16_t> shorts(n, 1000);
      std::vector<double> doubles(n, 0.5);
      std::vector<std::byte> complex(16 * n);
      auto* parts = reinterpret_cast<double*>(complex.data());
      std::fill(parts, parts + 2 * n, 0.25);
      Call call;
      call.op = Collective::kAllreduce;
      auto add = [&](DType type, void* data, uint64_t size) {
        call.tensors.push_back({type, {n}, data, data, size});
      };
      add(DType::kU8, bytes.data(), bytes.size());
      add(DType::kC128, complex.data(), complex.size());
      add(DType::kU16, shorts.data(), 2 * shorts.size());
      add(DType::kF64, doubles.data(), 8 * doubles.size());
      CHECK(c.Run(call).ok());
      for (int64_t i = 0; i < n; ++i) {
        const bool good = bytes[i] == 9 && shorts[i] == 3000 && doubles[i] == 1.5 &&
                          parts[2 * i] == 0.75 && parts[2 * i + 1] == 0.75;
        CHECK(good);
        if (!good) return;
      }
    }
  });
}

TEST(AllRanksEndWithTheSameBits) {
  const size_t p = 5;
  World world(std::vector<int>(p, 0), "", 4096, 20, kTile);
  for (const int wire : {-1, static_cast<int>(DType::kF16)})
    for (const size_t n : {700, 50001}) {
      std::vector<std::vector<float>> results(p, std::vector<float>(n));
      world.Each([&](Communicator& c) {
        std::mt19937 random(c.rank());
        std::uniform_real_distribution<float> any(-1, 1);
        std::vector<float>& data = results[c.rank()];
        for (float& x : data) x = any(random);
        Call call = AllreduceOf(&data, ReduceOp::kAverage);
        call.wire = wire;
        CHECK(c.Run(call).ok());
      });
      for (const auto& data : results)
        CHECK(std::memcmp(data.data(), results[0].data(), 4 * n) == 0);
    }
}

// After a loss, a rank takes reduced tiles from the shared segment only if no slot was
// overwritten.
TEST(ReducedTilesAreRetainedIfNoSlotIsReused) {
  const auto bells = MakeDoorbells(2, 4096, kTile);
  SharedSegment segment(bells[0].get());
  segment.Publish(SharedSegment::kFinished, 7);
  for (const DType wire : {DType::kF32, DType::kF16}) {
    const Arithmetic a{DType::kF32, wire};
    const uint64_t tile = kTile / Width(wire), sets = SharedSegment::kTiles;
    CHECK_EQ(RetainedWhenReducedIs(1, a, segment), 8u);
    CHECK_EQ(RetainedWhenReducedIs(tile + 1, a, segment), 9u);
    CHECK_EQ(RetainedWhenReducedIs(sets * tile, a, segment), 7 + sets);
    CHECK_EQ(RetainedWhenReducedIs(sets * tile + 1, a, segment), 0u);
    CHECK_EQ(RetainedWhenReducedIs((sets + 1) * tile + 1, a, segment), 0u);
  }
}

TEST(ADisagreementLeavesTheSegmentUsable) {
  World world({0, 0, 0}, "", 4096, 20, kTile);
  world.Each([](Communicator& c) {
    for (const size_t n : {10, 20000}) {
      std::vector<float> data(c.rank() == 1 ? n + 1 : n, 1.0f);
      const Status status = c.Run(AllreduceOf(&data));
      CHECK(status.code() == Code::kMismatch);
      CHECK_EQ(status.rank(), 1);
      for (const float x : data) CHECK_EQ(x, 1.0f);
      CheckAllreduce(c, {n}, {});
    }
  });
}

double ThreadSeconds() {
  timespec t{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec) * 1e-9;
}

TEST(ALatePeerOfASegmentIsNamedAndCostsNoCpuTime) {
  World world({0, 0, 0}, "", 4096, 1.5, kTile);
  std::vector<float> data(8, 1.0f);
  std::thread one([&] {
    std::vector<float> other(8, 1.0f);
    CHECK(world.ranks[1]->Run(AllreduceOf(&other)).code() == Code::kDeadlineExceeded);
  });
  const double before = ThreadSeconds();
  const Status status = world.ranks[0]->Run(AllreduceOf(&data));
  CHECK(ThreadSeconds() - before < 0.3);  // the wait lasts 1.5 s or more and must sleep
  one.join();
  CHECK(status.code() == Code::kDeadlineExceeded);
  CHECK_EQ(status.rank(), 2);
}

TEST(APeerThatLeavesIsDetectedOnTheSegment) {
  for (const size_t n : {8, 100000}) {
    World world({0, 0}, "", 4096, 20, kTile);
    std::thread zero([&] {
      std::vector<float> data(n, 1.0f);
      const Status status = world.ranks[0]->Run(AllreduceOf(&data));
      CHECK(status.code() == Code::kUnavailable);
      CHECK_EQ(status.rank(), 1);
    });
    while (world.ranks[0]->entered() == 0) std::this_thread::yield();
    world.ranks[1].reset();
    zero.join();
  }
}

// Two ends of a shared segment; the test acts as the second rank.
struct PlayedSegments {
  explicit PlayedSegments(double timeout = 20) {
    CommunicatorOptions o;
    o.topology = {0, 2, {0, 0}};
    o.world_ranks = {0, 1};
    o.collective_timeout = timeout;
    std::vector<std::unique_ptr<Link>> links(2);
    links[1] = std::move(ends.links[0]);
    auto segment = std::make_unique<SharedSegment>(ends.bells[0].get());
    ours = std::make_unique<Communicator>(o, std::move(links), std::move(ends.bells[0]),
                                          std::move(segment));
  }
  Ends ends = ShmEnds(4096, kTile);
  std::unique_ptr<SharedSegment> theirs =
      std::make_unique<SharedSegment>(ends.bells[1].get());
  std::unique_ptr<Communicator> ours;
};

TEST(ImpossibleCountersAreDamage) {
  for (const uint64_t lie : {uint64_t{3}, ~uint64_t{0}, uint64_t{1} << 63}) {
    PlayedSegments played;
    played.theirs->Publish(SharedSegment::kAgreed, lie);
    std::vector<float> data(8, 1.0f);
    const Status status = played.ours->Run(AllreduceOf(&data));
    CHECK(status.code() == Code::kUnavailable);
    CHECK(status.message().find("damaged") != std::string::npos);
    CHECK_EQ(status.rank(), 1);
  }
  for (const SharedSegment::Counter counter :
       {SharedSegment::kCopiedIn, SharedSegment::kReduced, SharedSegment::kFinished}) {
    PlayedSegments played;
    std::vector<float> data(100000, 1.0f);
    std::thread peer([&] {  // agrees to each call, then publishes false counters
      while (played.theirs->Look(SharedSegment::kAgreed, 0) == 0)
        std::this_thread::yield();
      std::memcpy(played.theirs->InlineSlot(1, 1), played.theirs->InlineSlot(1, 0), 64);
      if (counter != SharedSegment::kCopiedIn)
        played.theirs->Publish(SharedSegment::kCopiedIn, 1);
      played.theirs->Publish(counter, 1000);
      if (counter == SharedSegment::kFinished) {
        played.theirs->Publish(SharedSegment::kCopiedIn, 100000);
        played.theirs->Publish(SharedSegment::kReduced, 1);
      }
      played.theirs->Publish(SharedSegment::kAgreed, 1);
    });
    const Status status = played.ours->Run(AllreduceOf(&data));
    peer.join();
    CHECK(status.code() == Code::kUnavailable);
    CHECK(status.message().find("damaged") != std::string::npos);
  }
}

TEST(ARankSleepsWhileItWaitsForAStoppedPeer) {
  PlayedSegments played(1.5);
  std::vector<float> data(100000, 1.0f);
  std::thread peer([&] {
    while (played.theirs->Look(SharedSegment::kAgreed, 0) == 0)
      std::this_thread::yield();
    std::memcpy(played.theirs->InlineSlot(1, 1), played.theirs->InlineSlot(1, 0), 64);
    played.theirs->Publish(SharedSegment::kAgreed, 1);
    played.theirs->Publish(SharedSegment::kCopiedIn, 2);
    while (played.theirs->Look(SharedSegment::kReduced, 0) < 2)
      std::this_thread::yield();
    played.theirs->Publish(SharedSegment::kReduced, 1);
  });
  const double before = ThreadSeconds();
  const Status status = played.ours->Run(AllreduceOf(&data));
  CHECK(ThreadSeconds() - before < 0.3);
  peer.join();
  CHECK(status.code() == Code::kDeadlineExceeded);
  CHECK_EQ(status.rank(), 1);
}

}  // namespace
}  // namespace ringjax
