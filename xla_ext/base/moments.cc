// The loops of moments.h, for each element type and each CPU level (cpu_level.h).
#include "base/moments.h"

#include <algorithm>

#include "base/cpu_level.h"
#include "base/float_mode.h"
#include "base/reduce_kernels.h"
#include "base/status.h"

namespace ringjax {
namespace {

using namespace kernels;

// The number of independent partial sums, one for each lane of a SIMD vector.
constexpr size_t kLanes = 8;
// The number of elements widened at a time, so small that they stay in the L1 cache.
constexpr size_t kMomentBlock = 512;

// A vector type of GCC and Clang, because few compilers vectorise a loop over lanes.
using Vector [[gnu::vector_size(kLanes * sizeof(double))]] = double;

struct VectorMoments {
  Vector ab{}, aa{}, bb{};
};

// Adds the moments of `n` elements to `*sums`. `n` is a multiple of kLanes.
template <typename V>
RINGJAX_INLINE void AddVectors(const std::byte* a, const std::byte* b, size_t n,
                               VectorMoments* sums) {
  using Loaded [[gnu::vector_size(kLanes * sizeof(V))]] = V;
  VectorMoments s = *sums;
  for (size_t i = 0; i < n; i += kLanes) {
    Loaded from_a, from_b;
    std::memcpy(&from_a, a + i * sizeof(V), sizeof from_a);
    std::memcpy(&from_b, b + i * sizeof(V), sizeof from_b);
    const Vector x = __builtin_convertvector(from_a, Vector);
    const Vector y = __builtin_convertvector(from_b, Vector);
    s.ab += x * y;
    s.aa += x * x;
    s.bb += y * y;
  }
  *sums = s;
}

// Adds the moments of n <= kMomentBlock elements: widens the elements, and pads them
// with zeros to whole SIMD vectors.
template <typename T>
RINGJAX_INLINE void AddBlock(const std::byte* a, const std::byte* b, size_t n,
                             VectorMoments* sums) {
  using V = typename T::Value;
  alignas(64) V left[kMomentBlock], right[kMomentBlock];
  RINGJAX_VECTOR_LOOP
  for (size_t i = 0; i < n; ++i) {
    left[i] = T::Widen(LoadAs<T>(a, i));
    right[i] = T::Widen(LoadAs<T>(b, i));
  }
  size_t whole = n;
  for (; whole % kLanes != 0; ++whole) left[whole] = right[whole] = 0;
  AddVectors<V>(reinterpret_cast<const std::byte*>(left),
                reinterpret_cast<const std::byte*>(right), whole, sums);
}

template <typename T>
RINGJAX_INLINE void MomentsOf(const void* from_a, const void* from_b, size_t n,
                              Moments* moments) {
  constexpr size_t kWidth = sizeof(typename T::Stored);
  const auto* a = static_cast<const std::byte*>(from_a);
  const auto* b = static_cast<const std::byte*>(from_b);
  VectorMoments sums;
  size_t done = 0;
  if constexpr (std::is_same_v<typename T::Stored, typename T::Value>) {
    done = n - n % kLanes;
    AddVectors<typename T::Value>(a, b, done, &sums);
  }
  for (; done < n; done += kMomentBlock)
    AddBlock<T>(a + done * kWidth, b + done * kWidth, std::min(kMomentBlock, n - done),
                &sums);
  for (size_t lane = 0; lane < kLanes; ++lane) {
    moments->ab += sums.ab[lane];
    moments->aa += sums.aa[lane];
    moments->bb += sums.bb[lane];
  }
}

template <typename T, typename V>
RINGJAX_INLINE void Weighted(void* out, const void* a, V wa, const void* b, V wb,
                             size_t n) {
  RINGJAX_VECTOR_LOOP
  for (size_t i = 0; i < n; ++i) {
    const V x = static_cast<V>(T::Widen(LoadAs<T>(a, i)));
    const V y = static_cast<V>(T::Widen(LoadAs<T>(b, i)));
    const V sum = wa * x + wb * y;
    StoreAs<T>(out, i, T::Narrow(static_cast<typename T::Value>(sum)));
  }
}

void CheckFloat(DType dtype) { RJ_CHECK(IsFloat(dtype), "moments of no float"); }

RINGJAX_INLINE void MomentsByType(const void* a, const void* b, size_t n, DType dtype,
                                  Moments* moments) {
  ByFloat(dtype, [&](auto type) RINGJAX_INLINE_LAMBDA {
    MomentsOf<decltype(type)>(a, b, n, moments);
  });
}

// Computes in float for the 16-bit types and in double for the others.
RINGJAX_INLINE void WeightedByType(void* out, const void* a, double wa, const void* b,
                                   double wb, size_t n, DType dtype) {
  ByFloat(dtype, [&](auto type) RINGJAX_INLINE_LAMBDA {
    using T = decltype(type);
    using V = std::conditional_t<sizeof(typename T::Stored) == 2, float, double>;
    Weighted<T, V>(out, a, static_cast<V>(wa), b, static_cast<V>(wb), n);
  });
}

}  // namespace

void AddMoments(const void* a, const void* b, size_t n, DType dtype, Moments* moments) {
  CheckFloat(dtype);
  const FloatMode mode;
  ByLevel<MomentsByType>(a, b, n, dtype, moments);
}

void AddWeighted(void* out, const void* a, double wa, const void* b, double wb,
                 size_t n, DType dtype) {
  CheckFloat(dtype);
  const FloatMode mode;
  ByLevel<WeightedByType>(out, a, wa, b, wb, n, dtype);
}

}  // namespace ringjax
