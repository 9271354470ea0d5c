// Threads that flush denormals, as those of XLA and TensorFlow do, or round another
// way. Their results have the bits of any other thread, and the threads keep their
// mode.
#include "base/float_mode.h"

#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "base/moments.h"
#include "base/reduce.h"
#include "check.h"
#include "local_world.h"

namespace ringjax {
namespace {

#if defined(__x86_64__)
constexpr FloatMode::Control kFlush = 0x1f80 | 1u << 15 | 1u << 6;  // FTZ and DAZ
constexpr FloatMode::Control kUp = 0x1f80 | 2u << 13;
#else
constexpr FloatMode::Control kFlush = FloatMode::Control{1} << 24;
constexpr FloatMode::Control kUp = FloatMode::Control{1} << 22;
#endif

// Gives this thread another mode while the object lives.
class OtherMode {
 public:
  explicit OtherMode(FloatMode::Control mode) : before_(FloatMode::Get()) {
    FloatMode::Set(mode);
  }
  ~OtherMode() { FloatMode::Set(before_); }

 private:
  FloatMode::Control before_;
};

constexpr ReduceOp kOps[] = {ReduceOp::kSum, ReduceOp::kMin, ReduceOp::kMax,
                             ReduceOp::kProduct};

uint64_t Reduced(uint64_t own, uint64_t received, DType t, ReduceOp op) {
  uint64_t out = 0;
  Combine(&out, &own, &received, 1, {t, t, op}, true, true);
  return out;
}

TEST(DenormalsAreNumbersInThreadsThatFlushThem) {
  const OtherMode flushing(kFlush);
  for (DType t : kFloats) {
    const uint64_t sign = uint64_t{1} << (8 * Width(t) - 1);
    CHECK_EQ(Reduced(5, 3, t, ReduceOp::kMin), 3u);
    CHECK_EQ(Reduced(5, 3, t, ReduceOp::kMax), 5u);
    CHECK_EQ(Reduced(5, 3, t, ReduceOp::kSum), 8u);
    CHECK_EQ(Reduced(sign | 5, sign | 3, t, ReduceOp::kMin), sign | 5);
    CHECK_EQ(Reduced(sign | 5, 3, t, ReduceOp::kMax), 3u);
    CHECK_EQ(Reduced(sign, 3, t, ReduceOp::kMin), sign);
    CHECK_EQ(Reduced(0, 3, t, ReduceOp::kMax), 3u);
  }
}

using Bytes = std::vector<std::byte>;
constexpr size_t kElements = 509;

// Returns denormals and, if `others`, as many values of random bits.
Bytes Values(DType t, unsigned seed, bool others) {
  std::mt19937_64 random(seed);
  const int digits = t == DType::kF16 ? 10 : t == DType::kBF16 ? 7 : 23;
  const uint64_t mantissa = (uint64_t{1} << (t == DType::kF64 ? 52 : digits)) - 1;
  const uint64_t sign = uint64_t{1} << (8 * Width(t) - 1);
  Bytes all(kElements * Width(t));
  for (size_t i = 0; i < kElements; ++i) {
    uint64_t bits = random();
    if (!others || i % 2 == 0) bits &= sign | mantissa;
    std::memcpy(all.data() + i * Width(t), &bits, Width(t));
  }
  return all;
}

// Returns doubles that are denormals or zero in float and bf16.
Bytes SmallDoubles(unsigned seed) {
  std::mt19937_64 random(seed);
  Bytes all(kElements * 8);
  for (size_t i = 0; i < kElements; ++i) {
    const uint64_t bits = random(), exponent = 1023 - 160 + bits % 40;
    const uint64_t number = (bits & ~(uint64_t{0x7ff} << 52)) | exponent << 52;
    std::memcpy(all.data() + i * 8, &number, 8);
  }
  return all;
}

// Returns the results of all functions, one after another.
Bytes AllResults(const Arithmetic& a, const Bytes& own, const Bytes& received) {
  Bytes results, out(kElements * Width(a.dtype)), sent(kElements * Width(a.wire));
  const auto keep = [&](const Bytes& part) {
    results.insert(results.end(), part.begin(), part.end());
  };
  for (int ends = 0; ends < 4; ++ends) {
    Combine(out.data(), own.data(), received.data(), kElements, a, ends & 1, ends & 2);
    keep(out);
    CopyScaled(out.data(), own.data(), kElements, a, ends & 1, ends & 2);
    keep(out);
    Encode(sent.data(), own.data(), kElements, a, ends & 1);
    keep(sent);
    Decode(out.data(), received.data(), kElements, a);
    keep(out);
  }
  return results;
}

TEST(NoModeOfTheThreadChangesAResult) {
  for (DType t : kFloats)
    for (DType wire : {t, DType::kF16, DType::kBF16})
      for (ReduceOp op : kOps) {
        if (wire != t && Width(t) < 4) continue;
        for (double scale : {1.0, 0.3}) {
          const Arithmetic a{t, wire, op, scale, scale, scale == 1.0 ? 1 : 3};
          const Bytes received = Values(wire, 2, true);
          for (const Bytes& own :
               {Values(t, 1, true),
                t == DType::kF64 ? SmallDoubles(3) : Values(t, 3, false)}) {
            const Bytes want = AllResults(a, own, received);
            for (FloatMode::Control mode : {kFlush, kUp}) {
              const OtherMode otherwise(mode);
              CHECK(AllResults(a, own, received) == want);
            }
          }
        }
      }
}

// The vectors hold only denormals. A NaN among them would make every moment a NaN.
TEST(NoModeOfTheThreadChangesMoments) {
  for (DType t : kFloats) {
    const Bytes a = Values(t, 1, false), b = Values(t, 2, false);
    const auto all = [&] {
      Moments moments;
      AddMoments(a.data(), b.data(), kElements, t, &moments);
      Bytes results(sizeof moments + a.size());
      std::memcpy(results.data(), &moments, sizeof moments);
      AddWeighted(results.data() + sizeof moments, a.data(), 0.3, b.data(), 0.7,
                  kElements, t);
      return results;
    };
    const Bytes want = all();
    for (FloatMode::Control mode : {kFlush, kUp}) {
      const OtherMode otherwise(mode);
      CHECK(all() == want);
    }
  }
}

TEST(TheThreadKeepsItsMode) {
  const float own[] = {1, 2, 3}, received[] = {3, 2, 1};
  float out[3];
  for (FloatMode::Control mode : {kFlush, kUp}) {
    const OtherMode otherwise(mode);
    Combine(out, own, received, 3, {}, true, true);
    CopyScaled(out, own, 3, {.postscale = 0.1}, true, true);
    CHECK_EQ(FloatMode::Get(), mode);
  }
}

// Runs calls in which the thread of one rank flushes denormals and the others do not.
void CheckRanks(size_t tile, size_t n, ReduceOp op, int wire = -1) {
  const size_t p = 4;
  World world(std::vector<int>(p, 0), "", 4096, 20, tile);
  std::vector<std::vector<float>> results(p, std::vector<float>(n));
  world.Each([&](Communicator& c) {
    std::vector<float>& data = results[c.rank()];
    for (size_t i = 0; i < n; ++i) {
      const uint32_t bits = 3 + static_cast<uint32_t>(i * 4 + c.rank()) % 1000 * 4001;
      std::memcpy(&data[i], &bits, 4);
    }
    const OtherMode maybe(c.rank() == 1 ? kFlush : FloatMode::Get());
    Call call = AllreduceOf(&data, op);
    call.wire = wire;
    CHECK(c.Run(call).ok());
  });
  uint32_t first = 0;
  std::memcpy(&first, results[0].data(), 4);
  if (op == ReduceOp::kMin) CHECK_EQ(first, 3u);
  if (op == ReduceOp::kMax) CHECK_EQ(first, 3u + 3 * 4001);
  if (op == ReduceOp::kSum && wire < 0) CHECK_EQ(first, 4 * 3u + 6 * 4001);
  for (const auto& data : results)
    CHECK(std::memcmp(data.data(), results[0].data(), 4 * n) == 0);
}

TEST(RanksInOtherModesEndWithTheSameBits) {
  for (size_t tile : {0, 8192})
    for (size_t n : {100, 30001})  // inline data or tiles, with a shared segment
      for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kMin, ReduceOp::kMax,
                          ReduceOp::kAverage, ReduceOp::kAdasum})
        CheckRanks(tile, n, op);
  CheckRanks(8192, 100, ReduceOp::kSum, static_cast<int>(DType::kBF16));
}

}  // namespace
}  // namespace ringjax
