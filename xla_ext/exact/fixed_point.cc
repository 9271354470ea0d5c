// The loops, for the float types and two ways to convert between double and int64.
// ByLevel compiles them for several levels of x86-64.
#include "exact/fixed_point.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "base/cpu_level.h"
#include "base/float_mode.h"
#include "base/reduce_kernels.h"

namespace ringjax::exact {
namespace {

using namespace kernels;

// Adding it rounds a double below 2^51 to an integer, which is then in the low bits.
constexpr double kRounder = 0x1.8p52;

// Conversions between double and int64 by instructions of AVX-512, or of other
// architectures than x86-64.
struct ByInstruction {
  template <typename V>
  RINGJAX_INLINE static int64_t ToInteger(V value) {
    return static_cast<int64_t>(std::rint(value));
  }
  RINGJAX_INLINE static double ToDouble(int64_t v) { return static_cast<double>(v); }
};

// ByHalves converts in two halves of 32 bits, because older CPUs of x86-64 have no
// vector instructions for 64 bits. Only the last addition of each rounds.
struct ByHalves {
  RINGJAX_INLINE static int64_t ToInteger(double value) {
    const double high = value * 0x1p-32 + kRounder;
    const double rest = value - (high - kRounder) * 0x1p32;
    const uint64_t zero = std::bit_cast<uint64_t>(kRounder);
    return static_cast<int64_t>(((std::bit_cast<uint64_t>(high) - zero) << 32) +
                                (std::bit_cast<uint64_t>(rest + kRounder) - zero));
  }
  RINGJAX_INLINE static double ToDouble(int64_t v) {
    const auto bits = static_cast<uint64_t>(v);
    // The doubles 2^84 + 2^63 + high 2^32, and 2^52 + low.
    const auto high = std::bit_cast<double>((bits >> 32) ^ 0x4530000080000000u);
    const auto low = std::bit_cast<double>((bits & 0xffffffffu) | 0x4330000000000000u);
    return (high - (0x1p84 + 0x1p63 + 0x1p52)) + low;
  }
};

template <typename V>
RINGJAX_INLINE uint32_t Magnitude(V value) {
  return BitsOf(static_cast<float>(value)) & ~kSignBit;
}

struct Terms {
  const void* values;
  DType dtype;
  size_t n;
  int unit;
  uint64_t first;
  uint32_t limit;  // the magnitude that no longer fits
};

// The fast loop finds this. Counted() adds the rest, if anything did not fit.
struct Found {
  uint32_t top = 0;
  Checksum checksum;
};

template <typename Conversion, typename E>
RINGJAX_INLINE Found AddTerms(const Terms& t, int64_t* sums) {
  using V = typename E::Value;
  using Bits = BitsFor<V>;
  const V scale = std::ldexp(V{1}, -t.unit);
  const uint32_t limit = t.limit;
  const void* const values = t.values;
  const size_t n = t.n;
  uint32_t top = 0;
  uint64_t plain = 0, weighted = 0;
  const uint64_t weight = 2 * t.first + 1;
  RINGJAX_VECTOR_LOOP
  for (size_t i = 0; i < n; ++i) {
    const V value = E::Widen(LoadAs<E>(values, i));
    const uint32_t magnitude = Magnitude(value);
    top = std::max(top, magnitude);
    const Bits keep = magnitude < limit ? ~Bits{0} : Bits{0};
    const V kept = std::bit_cast<V>(std::bit_cast<Bits>(value) & keep);
    const auto term = static_cast<uint64_t>(Conversion::ToInteger(kept * scale));
    sums[i] = static_cast<int64_t>(static_cast<uint64_t>(sums[i]) + term);
    plain += term;
    weighted += term * (weight + 2 * i);
  }
  return {top, {plain, weighted}};
}

template <typename E>
Added Counted(const Terms& t, const Found& found) {
  Added added{0, 0, 0, found.checksum};
  uint32_t top = found.top;
  if (top >= t.limit) {
    top = 0;
    for (size_t i = 0; i < t.n; ++i) {
      const uint32_t magnitude = Magnitude(E::Widen(LoadAs<E>(t.values, i)));
      const bool finite = magnitude < kFloatInfinity;
      added.not_finite += !finite;
      added.too_large += finite && magnitude >= t.limit;
      if (finite) top = std::max(top, magnitude);
    }
  }
  added.top = top >> 23 ? FloatFromBits(top) : 0;
  return added;
}

template <typename Conversion>
RINGJAX_INLINE Found AddAny(const Terms& t, int64_t* sums) {
  Found found;
  ByFloat(t.dtype, [&](auto type) RINGJAX_INLINE_LAMBDA {
    found = AddTerms<Conversion, decltype(type)>(t, sums);
  });
  return found;
}

RINGJAX_INLINE Checksum CheckAny(const int64_t* sums, size_t n, uint64_t first) {
  uint64_t plain = 0, weighted = 0;
  RINGJAX_VECTOR_LOOP
  for (size_t i = 0; i < n; ++i) {
    const auto element = static_cast<uint64_t>(sums[i]);
    plain += element;
    weighted += element * (2 * (first + i) + 1);
  }
  return {plain, weighted};
}

template <typename Conversion>
RINGJAX_INLINE void DecodeAny(const int64_t* sums, size_t n, double factor,
                              float* mean) {
  RINGJAX_VECTOR_LOOP
  for (size_t i = 0; i < n; ++i) {
    const double value = Conversion::ToDouble(sums[i]) * factor;
    const bool normal = std::fabs(value) >= std::numeric_limits<float>::min();
    mean[i] = static_cast<float>(normal ? value : 0.0);
  }
}

// Calls F<ByInstruction> or F<ByHalves>, compiled for the CPU's level.
#if defined(__x86_64__)
#define RINGJAX_BY_CONVERSION(F, ...)                               \
  (Level() == CpuLevel::kV4   ? AtV4<F<ByInstruction>>(__VA_ARGS__) \
   : Level() == CpuLevel::kV3 ? AtV3<F<ByHalves>>(__VA_ARGS__)      \
                              : F<ByHalves>(__VA_ARGS__))
#else
#define RINGJAX_BY_CONVERSION(F, ...) F<ByInstruction>(__VA_ARGS__)
#endif

}  // namespace

Added Add(const void* values, DType dtype, size_t n, int unit, int width,
          uint64_t first, int64_t* sums) {
  const int exponent = unit + width;
  const uint32_t limit =
      exponent > 127 ? kFloatInfinity : BitsOf(std::ldexp(1.0f, exponent));
  const Terms terms{values, dtype, n, unit, first, limit};
  const FloatMode mode;
  const Found found = RINGJAX_BY_CONVERSION(AddAny, terms, sums);
  Added added;
  ByFloat(dtype, [&](auto type) { added = Counted<decltype(type)>(terms, found); });
  return added;
}

Checksum Check(const int64_t* sums, size_t n, uint64_t first) {
  return ByLevel<CheckAny>(sums, n, first);
}

void Decode(const int64_t* sums, size_t n, int unit, int pieces, float* mean) {
  const double factor = std::ldexp(1.0 / pieces, unit);
  const FloatMode mode;
  RINGJAX_BY_CONVERSION(DecodeAny, sums, n, factor, mean);
}

void DecodeLeaves(const int64_t* sums, uint64_t first, size_t n,
                  std::span<const Leaf> leaves, int pieces, float* mean) {
  const FloatMode mode;
  for (const Leaf& leaf : leaves) {
    const uint64_t begin = std::max(leaf.first, first);
    const uint64_t end = std::min(leaf.first + leaf.n, first + n);
    if (begin >= end) continue;
    Decode(sums + (begin - first), end - begin, leaf.unit, pieces,
           mean + (begin - first));
  }
}

}  // namespace ringjax::exact
