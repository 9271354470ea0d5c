// The shared segment: results of inline data and of tiles, equal bits on all ranks, and
// peers that write false counters, leave, or are late.
#include "transport/shared_segment.h"

#include <time.h>

#include <chrono>
#include <cstring>
#include <functional>
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

constexpr char kAllShared[] = "broadcast:shared,allgather:shared,alltoall:shared";

// Byte i of the data that rank `from` gives to rank `to`.
uint8_t Byte(int from, int to, size_t i) {
  return static_cast<uint8_t>(i * 7 + static_cast<size_t>(from) * 31 +
                              static_cast<size_t>(to) * 101);
}

std::vector<uint8_t> Bytes(int from, int to, int64_t n) {
  std::vector<uint8_t> bytes;
  for (size_t i = 0; i < static_cast<size_t>(n); ++i)
    bytes.push_back(Byte(from, to, i));
  return bytes;
}

void Append(std::vector<uint8_t>* to, const std::vector<uint8_t>& bytes) {
  to->insert(to->end(), bytes.begin(), bytes.end());
}

Tensor TensorOf(std::vector<uint8_t>* in, std::vector<uint8_t>* out) {
  return {DType::kU8,
          {static_cast<int64_t>(in->size())},
          in->data(),
          out->data(),
          out->size()};
}

Call MoveOf(Collective op, std::vector<int64_t> rows = {}, int root = 0) {
  Call call;
  call.op = op;
  call.name = "m";
  call.rows = std::move(rows);
  call.root = root;
  return call;
}

// Broadcasts tensors of n, 0, 1 and 9000 bytes.
void CheckBroadcast(Communicator& c, int root, int64_t n, bool in_place) {
  const std::vector<int64_t> sizes = {n, 0, 1, 9000};
  std::vector<std::vector<uint8_t>> in, out;
  for (const int64_t size : sizes) {
    in.push_back(Bytes(c.rank(), 0, size));
    out.emplace_back(static_cast<size_t>(size), uint8_t{1});
  }
  Call call = MoveOf(Collective::kBroadcast, {}, root);
  for (size_t k = 0; k < sizes.size(); ++k)
    call.tensors.push_back(TensorOf(&in[k], in_place ? &in[k] : &out[k]));
  CHECK(c.Run(call).ok());
  for (size_t k = 0; k < sizes.size(); ++k)
    CHECK((in_place ? in[k] : out[k]) == Bytes(root, 0, sizes[k]));
}

void CheckAllgather(Communicator& c, const std::vector<int64_t>& rows) {
  std::vector<uint8_t> want;
  for (int r = 0; r < c.size(); ++r)
    Append(&want, Bytes(r, 0, rows[static_cast<size_t>(r)]));
  std::vector<uint8_t> in = Bytes(c.rank(), 0, rows[static_cast<size_t>(c.rank())]);
  std::vector<uint8_t> out(want.size());
  Call call = MoveOf(Collective::kAllgather, rows);
  call.tensors.push_back(TensorOf(&in, &out));
  CHECK(c.Run(call).ok());
  CHECK(out == want);
}

// Runs an alltoall in which every rank sends n bytes to every rank, but rank 0 sends
// itself `more` bytes more.
void CheckAlltoall(Communicator& c, int64_t n, int64_t more = 0) {
  const auto size = static_cast<size_t>(c.size());
  std::vector<uint8_t> in, want;
  std::vector<int64_t> rows;
  for (size_t side = 0; side < 2; ++side)
    for (int r = 0; r < c.size(); ++r)
      rows.push_back(n + (r == 0 && c.rank() == 0 ? more : 0));
  for (int r = 0; r < c.size(); ++r) {
    Append(&in, Bytes(c.rank(), r, rows[static_cast<size_t>(r)]));
    Append(&want, Bytes(r, c.rank(), rows[size + static_cast<size_t>(r)]));
  }
  std::vector<uint8_t> out(want.size());
  Call call = MoveOf(Collective::kAlltoall, rows);
  call.tensors.push_back(TensorOf(&in, &out));
  CHECK(c.Run(call).ok());
  CHECK(out == want);
}

// Inline data, one tile and many tiles, between allreduces that advance the cursor by
// any amount.
void Moves() {
  for (const int p : {2, 3, 5}) {
    World world(std::vector<int>(static_cast<size_t>(p), 0), kAllShared, 4096, 20,
                kTile);
    world.Each([&](Communicator& c) {
      for (const int64_t n : {0, 1, 70'001, 80'000, 300'001}) {
        const bool in_place = n % 2 == 0;
        for (const int root : {0, p - 1}) CheckBroadcast(c, root, n, in_place);
        CheckAllgather(c, std::vector<int64_t>(static_cast<size_t>(p), n));
        std::vector<int64_t> uneven, one(static_cast<size_t>(p), 0);
        for (int r = 0; r < p; ++r) uneven.push_back(r * n / 3);
        one[1] = n;
        CheckAllgather(c, uneven);
        CheckAllgather(c, one);
        CheckAlltoall(c, n);
        CheckAlltoall(c, n / p);
        CheckAllreduce(c, {static_cast<size_t>(n) + 1}, {});
        CheckReducescatter(c, std::vector<int64_t>(static_cast<size_t>(p), n), 1, {});
      }
    });
    for (const auto& [op, stats] : world.ranks[0]->log().stats()) {
      CHECK_EQ(stats.algorithms.size(), size_t{1});
      CHECK(stats.algorithms.at("shared") > 0);  // calls without bytes do not count
    }
  }
}
TEST(MovesOverASegment) { Moves(); }
TEST(MovesOverASegmentByNonTemporalStores) {
  const Override<bool> past(&always_non_temporal, true);
  Moves();
}

TEST(LongMovesOverASegment) {
  World world({0, 0, 0}, kAllShared, 4096, 20, 1 << 18);
  world.Each([](Communicator& c) {
    CheckBroadcast(c, 1, 9'000'001, false);
    CheckAllgather(c, {3'000'001, 0, 6'000'000});
    CheckAlltoall(c, 3'000'001);
  });
}

// Only ranks that all send the same number of bytes to each rank can use the segment.
TEST(AnAlltoallThatIsNotEvenIsSentPairwise) {
  World world({0, 0, 0}, kAllShared, 4096, 20, kTile);
  world.Each([](Communicator& c) {
    for (const int64_t n : {70'000, 100'001}) {
      CheckAlltoall(c, n, 1);
      CheckAlltoall(c, n);
    }
  });
  const auto algorithms = world.ranks[1]->log().stats().at("alltoall").algorithms;
  CHECK_EQ(algorithms.at("shared"), 2u);
  CHECK_EQ(algorithms.at("pairwise"), 2u);
}

TEST(RowsThatAreEvenOnEachRankButDifferAreAMismatch) {
  for (const std::vector<int>& hosts : {std::vector{0, 0, 0}, {0, 0, 1}}) {
    World world(hosts, "", 4096, 20, kTile);
    world.Each([](Communicator& c) {
      for (const int64_t n : {1, 100'000}) {
        const int64_t mine = c.rank() == 1 ? 2 * n : n;
        std::vector<uint8_t> in(static_cast<size_t>(3 * mine)), out(in);
        Call call = MoveOf(Collective::kAlltoall, std::vector<int64_t>(6, mine));
        call.tensors.push_back(TensorOf(&in, &out));
        CHECK(c.Run(call).code() == Code::kMismatch);
        CheckAlltoall(c, n);
      }
    });
  }
}

// There are more ranks than cache lines in a tile.
TEST(AnAlltoallOfMoreRanksThanATileHasLines) {
  constexpr size_t kRanks = 4096 / kLineBytes + 1;
  World world(std::vector<int>(kRanks, 0), kAllShared, 4096, 60, 4096);
  world.Each([&](Communicator& c) {
    CheckAlltoall(c, 300);
    CheckAllgather(c, std::vector<int64_t>(kRanks, 20'000));
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
    o.algorithm = kAllShared;
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

// Runs a collective that only moves data beside a peer that agrees to it, after `act`.
// If `leaves`, the peer is lost after its agreement.
Status RunMoveBesidePeer(Collective op, int root, bool leaves,
                         const std::function<void(SharedSegment&)>& act) {
  PlayedSegments played;
  std::vector<uint8_t> in(200'000), out(in);
  std::vector<int64_t> rows(op == Collective::kAlltoall ? 4 : 2, 100'000);
  if (op == Collective::kBroadcast) rows.clear();
  if (op == Collective::kAllgather) in.resize(100'000);
  Call call = MoveOf(op, rows, root);
  call.tensors.push_back(TensorOf(&in, &out));
  std::thread peer([&] {
    SharedSegment& theirs = *played.theirs;
    while (theirs.Look(SharedSegment::kAgreed, 0) == 0) std::this_thread::yield();
    // The frame, and the table of an alltoall.
    std::memcpy(theirs.InlineSlot(1, 1), theirs.InlineSlot(1, 0), 128);
    act(theirs);
    theirs.Publish(SharedSegment::kAgreed, 1);
    if (leaves) played.theirs.reset();
  });
  const Status status = played.ours->Run(call);
  peer.join();
  return status;
}

constexpr Collective kMoves[] = {Collective::kBroadcast, Collective::kAllgather,
                                 Collective::kAlltoall};

TEST(APeerThatIsLostDuringAMoveIsDetectedOnTheSegment) {
  for (const Collective op : kMoves)
    for (const bool midway : {false, true}) {
      // The rank waits for data of the peer, or until the peer has read its own.
      const int root = midway ? 0 : 1;
      const Status status = RunMoveBesidePeer(op, root, true, [&](auto& theirs) {
        if (midway) theirs.Publish(SharedSegment::kCopiedIn, 2);
      });
      CHECK(status.code() == Code::kUnavailable);
      CHECK(status.message().find("closed the link") != std::string::npos);
      CHECK_EQ(status.rank(), 1);
    }
}

TEST(ImpossibleCountersInAMoveAreDamage) {
  for (const Collective op : kMoves)
    for (const auto counter : {SharedSegment::kCopiedIn, SharedSegment::kReduced}) {
      // A rank reads kCopiedIn before it reads a slot, and kReduced before it writes to
      // its own slot again.
      const bool reads = counter == SharedSegment::kCopiedIn;
      const Status status =
          RunMoveBesidePeer(op, reads ? 1 : 0, false, [&](auto& theirs) {
            if (!reads) theirs.Publish(SharedSegment::kCopiedIn, 1);
            theirs.Publish(counter, 1000);
          });
      CHECK(status.code() == Code::kUnavailable);
      CHECK(status.message().find("damaged") != std::string::npos);
    }
}

// Runs an allreduce with a peer that agrees to it, calls `step`, and then stops. Checks
// that this rank sleeps until the timeout, and names the peer.
void CheckSleeps(PlayedSegments* played, std::vector<float>* data,
                 const std::function<void()>& step) {
  SharedSegment& theirs = *played->theirs;
  std::thread peer([&] {
    while (theirs.Look(SharedSegment::kAgreed, 0) == 0) std::this_thread::yield();
    std::memcpy(theirs.InlineSlot(1, 1), theirs.InlineSlot(1, 0), 64);
    theirs.Publish(SharedSegment::kAgreed, 1);
    step();
  });
  const double before = ThreadSeconds();
  const Status status = played->ours->Run(AllreduceOf(data));
  CHECK(ThreadSeconds() - before < 0.3);
  peer.join();
  CHECK(status.code() == Code::kDeadlineExceeded);
  CHECK_EQ(status.rank(), 1);
}

TEST(ARankSleepsWhileItWaitsForAStoppedPeer) {
  PlayedSegments played(1.5);
  std::vector<float> data(100000, 1.0f);
  CheckSleeps(&played, &data, [&] {
    played.theirs->Publish(SharedSegment::kCopiedIn, 2);
    while (played.theirs->Look(SharedSegment::kReduced, 0) < 2)
      std::this_thread::yield();
    played.theirs->Publish(SharedSegment::kReduced, 1);
  });
}

// The message has three tiles. This rank copies in all of them, which makes the sum of
// the counters as large as if both ranks had copied in the first tile.
TEST(ARankAheadOfAStoppedPeerSleeps) {
  PlayedSegments played(1.5);
  std::vector<float> data(3 * kTile / sizeof(float), 1.0f);
  CheckSleeps(&played, &data, [] {});
}

}  // namespace
}  // namespace ringjax
