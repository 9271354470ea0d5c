// Ranks with CPUs of different levels end with the same bits.
#include "base/cpu_level.h"

#include <cmath>
#include <cstring>
#include <random>

#include "base/convert.h"
#include "base/half_blocks.h"
#include "base/moments.h"
#include "base/reduce.h"
#include "check.h"
#include "local_world.h"
#include "transport/copy.h"

namespace ringjax {
namespace {

constexpr size_t kMany = 2501;  // more than one block, and no whole vectors

std::vector<std::byte> RandomBytes(size_t bytes, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::byte> all(bytes);
  for (std::byte& b : all) b = static_cast<std::byte>(random());
  return all;
}

// Makes all NaNs equal. If both operands are NaN, the compiler decides which of the two
// is the result.
void MaskNaN(DType t, std::vector<std::byte>* all) {
  for (size_t at = 0; at < all->size(); at += Width(t)) {
    double value = 0;
    float wide;
    if (t == DType::kF64) {
      std::memcpy(&value, all->data() + at, sizeof value);
    } else if (t == DType::kF32) {
      std::memcpy(&wide, all->data() + at, sizeof wide), value = wide;
    } else {
      Decode(&wide, all->data() + at, 1, {DType::kF32, t}), value = wide;
    }
    if (std::isnan(value)) std::memset(all->data() + at, 0xff, Width(t));
  }
}

std::vector<std::byte> Results(const Arithmetic& a) {
  const size_t width = Width(a.dtype), wire = Width(a.wire);
  const auto own = RandomBytes(kMany * width, 1),
             received = RandomBytes(kMany * wire, 2);
  std::vector<std::byte> sums(kMany * width), sent(kMany * wire), back(kMany * width);
  Combine(sums.data(), own.data(), received.data(), kMany, a, true, true);
  Encode(sent.data(), own.data(), kMany, a, true);
  Decode(back.data(), sent.data(), kMany, a);
  MaskNaN(a.dtype, &sums);
  MaskNaN(a.wire, &sent);
  MaskNaN(a.dtype, &back);
  for (const auto& more : {sent, back})
    sums.insert(sums.end(), more.begin(), more.end());
  return sums;
}

TEST(EveryLevelSumsToTheSameBits) {
  for (DType t : kFloats)
    for (DType wire : {t, DType::kF16, DType::kBF16})
      for (ReduceOp op :
           {ReduceOp::kSum, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct})
        for (double scale : {1.0, 0.3}) {
          if (wire != t && Width(t) == 2) continue;
          const Arithmetic a{t, wire, op, scale, 1.0, scale == 1.0 ? 1 : 3};
          std::vector<std::byte> base;
          for (CpuLevel level : {CpuLevel::kBase, CpuLevel::kV3, CpuLevel::kV4}) {
            const LevelForTests forced(level);
            if (level == CpuLevel::kBase) base = Results(a);
            CHECK(Results(a) == base);
          }
        }
}

TEST(EveryLevelHasTheSameMomentsAndCopies) {
  std::vector<float> x(kMany), y(kMany), copy(kMany);
  for (size_t i = 0; i < kMany; ++i) {
    x[i] = std::sin(static_cast<float>(i));
    y[i] = std::cos(static_cast<float>(3 * i));
  }
  Moments base;
  for (CpuLevel level : {CpuLevel::kBase, CpuLevel::kV3, CpuLevel::kV4}) {
    const LevelForTests forced(level);
    Moments found;
    AddMoments(x.data(), y.data(), kMany, DType::kF32, &found);
    if (level == CpuLevel::kBase) base = found;
    CHECK_EQ(found.ab, base.ab);
    CHECK_EQ(found.aa, base.aa);
    CHECK_EQ(found.bb, base.bb);
    CopyBytes(copy.data(), x.data(), kMany * sizeof(float));
    CHECK(copy == x);
    std::fill(copy.begin(), copy.end(), 0.0f);
  }
}

// Compares the CPU's own conversion with the integer code, for all halves, and for
// floats of every exponent with all bits that decide the rounding.
TEST(TheCpuConvertsHalvesLikeTheIntegerCode) {
  if (DetectedLevel() == CpuLevel::kBase) return;
  for (uint32_t h = 0; h <= 0xffff; ++h) {
    const uint16_t half = static_cast<uint16_t>(h);
    uint32_t wide;
    WidenHalves(&wide, &half, 1);
    const uint32_t want = BitsOf(HalfToFloat(half));
    CHECK_EQ(wide, std::isnan(FloatFromBits(want)) ? want | 0x400000u : want);
  }
  for (uint64_t step = 0; step < (uint64_t{1} << 32); step += 4093)
    for (uint32_t low : {0u, 0xfffu, 0x1000u, 0x1001u, 0x1fffu}) {
      const uint32_t bits = (static_cast<uint32_t>(step) & ~0x1fffu) | low;
      uint16_t narrow;
      NarrowHalves(&narrow, &bits, 1);
      CHECK_EQ(narrow, HalfFromFloatBits(bits));
    }
}

}  // namespace
}  // namespace ringjax
