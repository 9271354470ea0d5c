// Compares sums in fixed point with a slow reference in 128 bits, at every CPU level.
#include "exact/fixed_point.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "base/convert.h"
#include "base/cpu_level.h"
#include "check.h"

namespace ringjax::exact {
namespace {

constexpr CpuLevel kLevels[] = {CpuLevel::kBase, CpuLevel::kV3, CpuLevel::kV4};
constexpr DType kFloats[] = {DType::kF32, DType::kF64, DType::kF16, DType::kBF16};
constexpr size_t kSizes[] = {0, 1, 2, 15, 16, 33, 257};

// Values as they lie in memory, and the same as double.
struct Values {
  std::vector<std::byte> memory;
  std::vector<double> exact;
};

void Append(Values* values, DType dtype, double value) {
  const auto put = [&](auto stored, double exact) {
    const auto* bytes = reinterpret_cast<const std::byte*>(&stored);
    values->memory.insert(values->memory.end(), bytes, bytes + sizeof(stored));
    values->exact.push_back(exact);
  };
  const auto narrow = static_cast<float>(value);
  if (dtype == DType::kF64) return put(value, value);
  if (dtype == DType::kF32) return put(narrow, narrow);
  if (dtype == DType::kF16)
    return put(DoubleToHalf(value), HalfToFloat(DoubleToHalf(value)));
  put(DoubleToBFloat16(value), BFloat16ToFloat(DoubleToBFloat16(value)));
}

Values Drawn(std::mt19937* draw, DType dtype, size_t n, int spread) {
  Values values;
  std::uniform_real_distribution<double> mantissa(-1, 1);
  std::uniform_int_distribution<int> exponent(-spread, 0);
  for (size_t i = 0; i < n; ++i)
    Append(&values, dtype, std::ldexp(mantissa(*draw), exponent(*draw)));
  return values;
}

// Rounds halves to even without the floating-point unit's rounding: value is m 2^e.
int64_t Rounded(double value, int unit) {
  int e = 0;
  const auto m = static_cast<int64_t>(std::ldexp(std::frexp(std::fabs(value), &e), 53));
  const int shift = e - 53 - unit;
  if (shift < -60) return 0;
  int64_t whole = m;
  if (shift >= 0) {
    whole = m << shift;
  } else {
    const int64_t rest = m & ((int64_t{1} << -shift) - 1);
    const int64_t half = int64_t{1} << (-shift - 1);
    whole = m >> -shift;
    whole += rest > half || (rest == half && (whole & 1));
  }
  return value < 0 ? -whole : whole;
}

// Adds `values` at every level, compares with Rounded, and returns what Add has found.
Added AddAndCompare(DType dtype, const Values& values, int unit, int width,
                    uint64_t first) {
  const size_t n = values.exact.size();
  Added added;
  for (CpuLevel level : kLevels) {
    const LevelForTests lowered(level);
    std::vector<int64_t> sums(n, 7), wanted(n, 7);
    added = Add(values.memory.data(), dtype, n, unit, width, first, sums.data());
    std::vector<int64_t> terms(n);
    float top = 0;
    for (size_t i = 0; i < n; ++i) {
      const auto magnitude = std::fabs(static_cast<float>(values.exact[i]));
      if (!std::isfinite(magnitude)) continue;
      top = std::max(top, magnitude);
      if (std::ldexp(double{magnitude}, -unit) < std::ldexp(1.0, width))
        terms[i] = Rounded(values.exact[i], unit);
      wanted[i] += terms[i];
    }
    CHECK(sums == wanted);
    CHECK(added.checksum == Check(terms.data(), n, first));
    CHECK_EQ(added.top, top < std::numeric_limits<float>::min() ? 0 : top);
  }
  return added;
}

TEST(FixedPointAddsRoundedTerms) {
  std::mt19937 draw(5);
  for (DType dtype : kFloats)
    for (size_t n : kSizes)
      for (int width : {40, 51, 58, 62}) {
        const Added added =
            AddAndCompare(dtype, Drawn(&draw, dtype, n, 12), 1 - width, width, 3 * n);
        CHECK_EQ(added.too_large, 0u);
        CHECK_EQ(added.not_finite, 0u);
      }
}

TEST(FixedPointRoundsHalvesToEven) {
  Values values;
  for (int i = -9; i < 10; ++i) Append(&values, DType::kF32, 0.5 * i);
  AddAndCompare(DType::kF32, values, 0, 40, 0);
  // Large values of 64 bits with a half in the last place.
  Values wide;
  for (double x : {0x1p51 + 0.5, 0x1p51 + 1.5, 0x1p31 + 0.5, 0x1.8p31 - 0.5})
    for (double sign : {1.0, -1.0}) Append(&wide, DType::kF64, sign * x);
  AddAndCompare(DType::kF64, wide, 0, 62, 0);
}

TEST(FixedPointCountsWhatDoesNotFit) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  Values values;
  for (double x : {1.0, -2.0, 3.0, 0.25, -kInfinity, std::nan(""), 1e300})
    Append(&values, DType::kF64, x);
  const Added added = AddAndCompare(DType::kF64, values, -40, 41, 0);
  CHECK_EQ(added.too_large, 2u);
  CHECK_EQ(added.not_finite, 3u);
  CHECK_EQ(added.top, 3.0f);
}

TEST(FixedPointTakesExtremes) {
  constexpr float kMost = std::numeric_limits<float>::max();
  constexpr float kDenormal = std::numeric_limits<float>::min() / 2;
  Values values;
  for (float x : {kMost, -kMost, kDenormal, 0.0f, -0.0f, 3 * kDenormal})
    Append(&values, DType::kF32, x);
  const Added added = AddAndCompare(DType::kF32, values, 78, 58, 0);
  CHECK_EQ(added.too_large, 0u);
  Values small;
  for (float x : {kDenormal, -kDenormal, 2 * kDenormal, 3 * kDenormal})
    Append(&small, DType::kF32, x);
  AddAndCompare(DType::kF32, small, kLowestUnit, 58, 0);
}

TEST(FixedPointMeansAreRoundedFromDouble) {
  std::mt19937_64 draw(6);
  for (size_t n : kSizes) {
    std::vector<int64_t> sums(n), own(n), more(n);
    for (size_t i = 0; i < n; ++i) {
      sums[i] = static_cast<int64_t>(draw()) >> (draw() % 63);
      more[i] = static_cast<int64_t>(draw()) >> (draw() % 63);
      own[i] = static_cast<int64_t>(static_cast<uint64_t>(sums[i]) -
                                    static_cast<uint64_t>(more[i]));
    }
    const Checksum checksum = Check(sums.data(), n, 3 * n);
    for (int unit : {kLowestUnit, -50, 0, 60})
      for (int pieces : {1, 3, 12, 2048}) {
        const double factor = std::ldexp(1.0 / pieces, unit);
        for (CpuLevel level : kLevels) {
          const LevelForTests lowered(level);
          std::vector<float> mean(n), added(n);
          CHECK(checksum ==
                Decode(sums.data(), nullptr, n, 3 * n, unit, pieces, mean.data()));
          CHECK(checksum ==
                Decode(own.data(), more.data(), n, 3 * n, unit, pieces, added.data()));
          for (size_t i = 0; i < n; ++i) {
            const double wanted = static_cast<double>(sums[i]) * factor;
            const bool normal = std::fabs(wanted) >= std::numeric_limits<float>::min();
            CHECK_EQ(mean[i], static_cast<float>(normal ? wanted : 0));
            CHECK_EQ(added[i], mean[i]);
          }
        }
      }
  }
}

TEST(FixedPointDecodesPartsOfLeaves) {
  std::vector<int64_t> sums(40), halves(40, 9);
  for (size_t i = 0; i < sums.size(); ++i) sums[i] = static_cast<int64_t>(i) - 17;
  std::vector<int64_t> rest = sums;
  for (auto& sum : rest) sum -= 9;
  const Leaf leaves[] = {{0, 10, 0}, {10, 0, 5}, {10, 25, 1}, {35, 5, -1}};
  std::vector<float> all(40);
  CHECK(DecodeLeaves(sums.data(), nullptr, 0, 40, leaves, 2, all.data()) ==
        Check(sums.data(), 40, 0));
  CHECK_EQ(all[0], -8.5f);
  CHECK_EQ(all[10], -7.0f);
  CHECK_EQ(all[39], 5.5f);
  for (size_t first : {0, 3, 10, 20, 34})
    for (size_t n : {0, 1, 5}) {
      std::vector<float> part(n);
      CHECK(DecodeLeaves(halves.data(), rest.data() + first, first, n, leaves, 2,
                         part.data()) == Check(sums.data() + first, n, first));
      for (size_t i = 0; i < n; ++i) CHECK_EQ(part[i], all[first + i]);
    }
}

TEST(FixedPointChecksumsSeeFlipsAndAdd) {
  std::mt19937_64 draw(7);
  std::vector<int64_t> a(100), b(100), both(100);
  for (size_t i = 0; i < a.size(); ++i) {
    a[i] = static_cast<int64_t>(draw()) >> 4, b[i] = static_cast<int64_t>(draw()) >> 4;
    both[i] = a[i] + b[i];
  }
  Checksum total = Check(a.data(), 50, 9);
  total += Check(a.data() + 50, 50, 59);
  CHECK(total == Check(a.data(), 100, 9));
  total += Check(b.data(), 100, 9);
  CHECK(total == Check(both.data(), 100, 9));
  for (int i = 0; i < 200; ++i) {
    const size_t at = draw() % both.size();
    const auto flip = static_cast<int64_t>(uint64_t{1} << (draw() % 64));
    both[at] ^= flip;
    CHECK(total != Check(both.data(), 100, 9));
    both[at] ^= flip;
  }
  std::swap(both[3], both[70]);
  CHECK_EQ(total.plain, Check(both.data(), 100, 9).plain);
  CHECK(total != Check(both.data(), 100, 9));
}

}  // namespace
}  // namespace ringjax::exact
