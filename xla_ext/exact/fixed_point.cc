// The loops over terms, sums and means. ByLevel compiles them for several levels of
// x86-64; the one over floats has a form of its own for AVX-512.
#include "exact/fixed_point.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <iterator>
#include <limits>
#include <type_traits>

#if defined(__x86_64__)
// GCC 12 warns of its own undefined values in the functions of AVX-512 (GCC bug
// 105593).
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif

#include "base/cpu_level.h"
#include "base/failpoint.h"
#include "base/float_mode.h"
#include "base/half_blocks.h"
#include "base/reduce_kernels.h"

namespace ringjax::exact {
namespace {

using namespace kernels;

// Vectors of four elements, in two registers where the CPU's are short. GCC and Clang
// have no shorter way to write a loop whose vectors keep sums of their own.
typedef float Floats __attribute__((vector_size(16), aligned(4), may_alias));
typedef double Doubles __attribute__((vector_size(32), aligned(8), may_alias));
typedef int32_t Ints __attribute__((vector_size(16)));
typedef uint64_t Words __attribute__((vector_size(32), aligned(8), may_alias));
constexpr size_t kLanes = 4;
constexpr size_t kStep = 16;  // the loops over terms take a multiple of it

// Adding it rounds a double below 2^51 to an integer, which is then in the low bits.
constexpr double kRounder = 0x1.8p52;

// The operands of a loop over terms in float or double.
template <typename V>
struct Terms {
  const V* values;
  size_t n;        // a multiple of kStep
  V scale;         // 2^-unit
  uint32_t limit;  // the magnitude as float32 that no longer fits
  uint64_t first;
};

struct Found {
  uint32_t top = 0;  // the largest magnitude, also of what is not finite
  Checksum checksum;
};

// Returns the checksum of `vectors` vectors whose first element has the place `first`,
// from the sums that RunningChecksum describes.
template <size_t lanes, typename Sums>
RINGJAX_INLINE Checksum TotalOf(const Sums& sums, const Sums& sums_of_sums,
                                uint64_t vectors, uint64_t first) {
  Checksum total;
  for (size_t lane = 0; lane < lanes; ++lane) {
    const uint64_t sum = sums[lane];
    const uint64_t later = vectors * sum - sums_of_sums[lane];
    total.plain += sum;
    total.weighted += (2 * (first + lane) + 1) * sum + 2 * lanes * later;
  }
  return total;
}

// Adds vectors of elements. The element i of the vectors has the weight 2 i + 1, but 64
// bits cannot be multiplied fast: adding the sums so far after each vector counts the
// first vector of T vectors T times, and the last one once.
struct RunningChecksum {
  Words sums = {}, sums_of_sums = {};
  RINGJAX_INLINE void Add(const Words& elements) {
    sums += elements;
    sums_of_sums += sums;
  }
  RINGJAX_INLINE Checksum Total(uint64_t vectors, uint64_t first) const {
    return TotalOf<kLanes>(sums, sums_of_sums, vectors, first);
  }
};

template <typename V>
RINGJAX_INLINE uint32_t Magnitude(V value) {
  return BitsOf(static_cast<float>(value)) & ~kSignBit;
}

// Reads four values that fit, and their magnitudes.
RINGJAX_INLINE void Load(const float* at, float scale, int32_t limit, Doubles* scaled,
                         Ints* magnitudes) {
  const auto bits = reinterpret_cast<Ints>(*reinterpret_cast<const Floats*>(at));
  *magnitudes = bits & 0x7fffffff;
  const auto kept = reinterpret_cast<Floats>(bits & (*magnitudes < limit));
  *scaled = __builtin_convertvector(kept * scale, Doubles);
}
RINGJAX_INLINE void Load(const double* at, double scale, int32_t limit, Doubles* scaled,
                         Ints* magnitudes) {
  const auto values = *reinterpret_cast<const Doubles*>(at);
  *magnitudes =
      reinterpret_cast<Ints>(__builtin_convertvector(values, Floats)) & 0x7fffffff;
  const auto keep = __builtin_convertvector(*magnitudes < limit, Words);
  *scaled = reinterpret_cast<Doubles>(reinterpret_cast<Words>(values) & keep) * scale;
}

// Rounds to int64 in two halves of 32 bits, because CPUs before AVX-512 have no
// instruction for it. Only the last addition rounds.
template <typename V>
RINGJAX_INLINE Found AddTerms(const Terms<V>& t, int64_t* sums) {
  const auto limit = static_cast<int32_t>(t.limit);
  const Words zero = reinterpret_cast<Words>(Doubles{} + kRounder);
  Ints top = {};
  RunningChecksum checksum;
  for (size_t i = 0; i < t.n; i += kLanes) {
    Doubles scaled;
    Ints magnitudes;
    Load(t.values + i, t.scale, limit, &scaled, &magnitudes);
    top = magnitudes > top ? magnitudes : top;
    const Doubles high = scaled * 0x1p-32 + kRounder;
    const Doubles rest = scaled - (high - kRounder) * 0x1p32 + kRounder;
    const Words terms =
        (reinterpret_cast<Words>(high) << 32) + (reinterpret_cast<Words>(rest) - zero);
    *reinterpret_cast<Words*>(sums + i) += terms;
    checksum.Add(terms);
  }
  Found found;
  for (size_t lane = 0; lane < kLanes; ++lane)
    found.top = std::max(found.top, static_cast<uint32_t>(top[lane]));
  found.checksum = checksum.Total(t.n / kLanes, t.first);
  return found;
}

#if defined(__x86_64__)
// Does the same for 16 floats at once, and takes no longer than its reads and writes.
[[RINGJAX_V4]] Found AddFloatsAtV4(const Terms<float>& t, int64_t* sums) {
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
  const __m512i limit = _mm512_set1_epi32(static_cast<int32_t>(t.limit));
  const __m512 scale = _mm512_set1_ps(t.scale);
  __m512i top = _mm512_setzero_si512(), low = top, high = top, sums_of_sums = top;
  for (size_t i = 0; i < t.n; i += kStep) {
    const __m512 values = _mm512_loadu_ps(t.values + i);
    const __m512i bits = _mm512_and_si512(_mm512_castps_si512(values), magnitude);
    top = _mm512_max_epi32(top, bits);
    const __mmask16 fits = _mm512_cmplt_epi32_mask(bits, limit);
    const __m512 scaled = _mm512_maskz_mul_ps(fits, values, scale);
    const __m512i a = _mm512_cvtps_epi64(_mm512_castps512_ps256(scaled));
    const __m512i b = _mm512_cvtps_epi64(_mm512_extractf32x8_ps(scaled, 1));
    int64_t* const at = sums + i;
    _mm512_storeu_si512(at, _mm512_add_epi64(_mm512_loadu_si512(at), a));
    _mm512_storeu_si512(at + 8, _mm512_add_epi64(_mm512_loadu_si512(at + 8), b));
    low = _mm512_add_epi64(low, a), high = _mm512_add_epi64(high, b);
    sums_of_sums = _mm512_add_epi64(sums_of_sums, _mm512_add_epi64(low, high));
  }
  Found found{static_cast<uint32_t>(_mm512_reduce_max_epi32(top)), {}};
  alignas(64) uint64_t lanes[kStep], later[kStep / 2];
  _mm512_store_si512(lanes, low);
  _mm512_store_si512(lanes + 8, high);
  _mm512_store_si512(later, sums_of_sums);
  Checksum& total = found.checksum;
  for (size_t lane = 0; lane < kStep; ++lane) {
    total.plain += lanes[lane];
    total.weighted += (2 * (t.first + lane) + 1) * lanes[lane];
  }
  uint64_t steps = t.n / kStep * total.plain;  // see RunningChecksum
  for (const uint64_t lane : later) steps -= lane;
  total.weighted += 2 * kStep * steps;
  return found;
}
#endif

template <typename V>
Found AddByLevel(const Terms<V>& t, int64_t* sums) {
#if defined(__x86_64__)
  if constexpr (std::is_same_v<V, float>)
    if (Level() == CpuLevel::kV4) return AddFloatsAtV4(t, sums);
#endif
  return ByLevel<AddTerms<V>>(t, sums);
}

// Adds any number of terms: the last few are copied, and zeros behind them.
template <typename V>
void AddAll(Terms<V> t, int64_t* sums, Found* found) {
  const auto add = [&](const Terms<V>& terms, int64_t* to) {
    const Found more = AddByLevel(terms, to);
    found->top = std::max(found->top, more.top);
    found->checksum += more.checksum;
  };
  const size_t rest = t.n % kStep;
  t.n -= rest;
  add(t, sums);
  if (rest == 0) return;
  V values[kStep] = {};
  int64_t last[kStep] = {};
  std::copy_n(t.values + t.n, rest, values);
  std::copy_n(sums + t.n, rest, last);
  add({values, kStep, t.scale, t.limit, t.first + t.n}, last);
  std::copy_n(last, rest, sums + t.n);
}

// Counts what does not fit. It is not part of the loops above, because it is rare.
template <typename E>
Added Counted(const void* values, size_t n, uint32_t limit, const Found& found) {
  Added added{0, 0, 0, found.checksum};
  uint32_t top = found.top;
  if (top >= limit) {
    top = 0;
    for (size_t i = 0; i < n; ++i) {
      const uint32_t magnitude = Magnitude(E::Widen(LoadAs<E>(values, i)));
      const bool finite = magnitude < kFloatInfinity;
      added.not_finite += !finite;
      added.too_large += finite && magnitude >= limit;
      if (finite) top = std::max(top, magnitude);
    }
  }
  added.top = top >> 23 ? FloatFromBits(top) : 0;
  return added;
}

RINGJAX_INLINE void WidenBlock(float* out, const uint16_t* in, size_t n, DType dtype) {
  if (dtype == DType::kF16) return Widen<F32, Half>(out, in, n);
  Widen<F32, BFloat16>(out, in, n);
}

// Adds terms of 16 bits, which are converted to floats in the cache.
void AddHalves(const uint16_t* values, DType dtype, size_t n, Terms<float> t,
               int64_t* sums, Found* found) {
  alignas(64) float floats[1024];
  float* const block = floats;
  for (size_t i = 0; i < n; i += t.n) {
    t.values = block, t.n = std::min(std::size(floats), n - i);
    if (dtype == DType::kF16 && ConvertsHalves()) {
      WidenHalves(block, values + i, t.n);
    } else {
      ByLevel<WidenBlock>(block, values + i, t.n, dtype);
    }
    AddAll(t, sums + i, found);
    t.first += t.n;
  }
}

RINGJAX_INLINE Checksum CheckAll(const int64_t* sums, size_t n, uint64_t first) {
  RunningChecksum checksum;
  const size_t whole = n / kLanes * kLanes;
  for (size_t i = 0; i < whole; i += kLanes)
    checksum.Add(*reinterpret_cast<const Words*>(sums + i));
  Checksum total = checksum.Total(whole / kLanes, first);
  for (size_t i = whole; i < n; ++i) {
    const auto element = static_cast<uint64_t>(sums[i]);
    total += {element, element * (2 * (first + i) + 1)};
  }
  return total;
}

// Sums that are to be decoded: `own`, to which `more` is added if it is not null.
struct Totals {
  const int64_t* own;
  const int64_t* more;
  size_t n;  // a multiple of kStep
  double factor;
  uint64_t first;
};

// Converts to double like static_cast, also where the CPU has no instruction for it:
// the doubles 2^84 + 2^63 + high 2^32, and 2^52 + low, are made of bits. Only the last
// addition rounds.
RINGJAX_INLINE void ToDoubles(const Words& values, Doubles* doubles) {
  const auto high = reinterpret_cast<Doubles>((values >> 32) ^ 0x4530000080000000u);
  const auto low =
      reinterpret_cast<Doubles>((values & 0xffffffffu) | 0x4330000000000000u);
  *doubles = (high - (0x1p84 + 0x1p63 + 0x1p52)) + low;
}

// Reads each sum once: the checksum and the mean are made of the same register, and
// their arithmetic takes no longer than the reads from the memory of another core.
RINGJAX_INLINE Checksum DecodeTotals(const Totals& t, float* mean) {
  constexpr double kNormal = std::numeric_limits<float>::min();
  RunningChecksum checksum;
  for (size_t i = 0; i < t.n; i += kLanes) {
    Words sums = *reinterpret_cast<const Words*>(t.own + i);
    if (t.more) sums += *reinterpret_cast<const Words*>(t.more + i);
    checksum.Add(sums);
    Doubles values;
    ToDoubles(sums, &values);
    values *= t.factor;
    // A mask selects the result, because a condition would prevent vectorisation.
    const auto keep = reinterpret_cast<Words>(values >= kNormal) |
                      reinterpret_cast<Words>(values <= -kNormal);
    values = reinterpret_cast<Doubles>(reinterpret_cast<Words>(values) & keep);
    *reinterpret_cast<Floats*>(mean + i) = __builtin_convertvector(values, Floats);
  }
  return checksum.Total(t.n / kLanes, t.first);
}

#if defined(__x86_64__)
[[RINGJAX_V4]] Checksum DecodeTotalsAtV4(const Totals& t, float* mean) {
  constexpr size_t kWide = 8;
  const __m512d factor = _mm512_set1_pd(t.factor);
  const __m512d normal = _mm512_set1_pd(std::numeric_limits<float>::min());
  __m512i sums = _mm512_setzero_si512(), sums_of_sums = sums;
  for (size_t i = 0; i < t.n; i += kWide) {
    __m512i x = _mm512_loadu_si512(t.own + i);
    if (t.more) x = _mm512_add_epi64(x, _mm512_loadu_si512(t.more + i));
    sums = _mm512_add_epi64(sums, x);
    sums_of_sums = _mm512_add_epi64(sums_of_sums, sums);
    const __m512d value = _mm512_mul_pd(_mm512_cvtepi64_pd(x), factor);
    const __mmask8 keep = _mm512_cmp_pd_mask(_mm512_abs_pd(value), normal, _CMP_GE_OQ);
    _mm256_storeu_ps(mean + i, _mm512_maskz_cvtpd_ps(keep, value));
  }
  alignas(64) uint64_t lanes[kWide], later[kWide];
  _mm512_store_si512(lanes, sums);
  _mm512_store_si512(later, sums_of_sums);
  return TotalOf<kWide>(lanes, later, t.n / kWide, t.first);
}
#endif

Checksum DecodeByLevel(const Totals& t, float* mean) {
#if defined(__x86_64__)
  if (Level() == CpuLevel::kV4) return DecodeTotalsAtV4(t, mean);
#endif
  return ByLevel<DecodeTotals>(t, mean);
}

}  // namespace

Added Add(const void* values, DType dtype, size_t n, int unit, int width,
          uint64_t first, int64_t* sums) {
  const uint32_t limit =
      unit + width > 127 ? kFloatInfinity : BitsOf(std::ldexp(1.0f, unit + width));
  const double scale = std::ldexp(1.0, -unit);
  const FloatMode mode;
  Found found;
  if (dtype == DType::kF64) {
    AddAll<double>({static_cast<const double*>(values), n, scale, limit, first}, sums,
                   &found);
    return Counted<F64>(values, n, limit, found);
  }
  const Terms<float> terms{static_cast<const float*>(values), n,
                           static_cast<float>(scale), limit, first};
  if (dtype == DType::kF32) {
    AddAll(terms, sums, &found);
    return Counted<F32>(values, n, limit, found);
  }
  AddHalves(static_cast<const uint16_t*>(values), dtype, n, terms, sums, &found);
  return dtype == DType::kF16 ? Counted<Half>(values, n, limit, found)
                              : Counted<BFloat16>(values, n, limit, found);
}

void AddLeaf(void* values, DType dtype, size_t n, size_t index, int unit, int width,
             uint64_t first, const Accumulator& to) {
  FlipAtFailpoint(Failpoint::kExactGradient, values, n * Width(dtype));
  const Added added = Add(values, dtype, n, unit, width, first, to.sums + first);
  to.counts[index][0] += static_cast<int32_t>(added.too_large);
  to.counts[index][1] += static_cast<int32_t>(added.not_finite);
  to.tops[index] = std::max(to.tops[index], added.top);
  *to.checksum += added.checksum;
}

Checksum Check(const int64_t* sums, size_t n, uint64_t first) {
  return ByLevel<CheckAll>(sums, n, first);
}

// Decodes any number of sums: the last few are copied, and zeros behind them.
Checksum Decode(const int64_t* own, const int64_t* more, size_t n, uint64_t first,
                int unit, int pieces, float* mean) {
  const FloatMode mode;
  const size_t rest = n % kStep, whole = n - rest;
  const double factor = std::ldexp(1.0 / pieces, unit);
  Checksum checksum = DecodeByLevel({own, more, whole, factor, first}, mean);
  if (rest == 0) return checksum;
  int64_t sums[kStep] = {}, terms[kStep] = {};
  float means[kStep];
  std::copy_n(own + whole, rest, sums);
  if (more) std::copy_n(more + whole, rest, terms);
  checksum += DecodeByLevel({sums, terms, kStep, factor, first + whole}, means);
  std::copy_n(means, rest, mean + whole);
  return checksum;
}

Checksum DecodeLeaves(const int64_t* own, const int64_t* more, uint64_t first, size_t n,
                      std::span<const Leaf> leaves, int pieces, float* mean) {
  const FloatMode mode;
  Checksum checksum;
  for (const Leaf& leaf : leaves) {
    const uint64_t begin = std::max(leaf.first, first);
    const uint64_t end = std::min(leaf.first + leaf.n, first + n);
    if (begin >= end) continue;
    const uint64_t at = begin - first;
    checksum += Decode(own + at, more ? more + at : nullptr, end - begin, begin,
                       leaf.unit, pieces, mean + at);
  }
  return checksum;
}

}  // namespace ringjax::exact
