// The loops of reduce.cc: element types, operations, and one template per kind of loop.
// All functions are forced inline into functions of reduce.cc, and some into functions
// of moments.cc, which are compiled once per CPU level. No other file uses them.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "base/convert.h"
#include "base/dtype.h"

// Forces inlining of a lambda, as RINGJAX_INLINE does for functions. Write it after the
// parameter list of the lambda.
#define RINGJAX_INLINE_LAMBDA __attribute__((always_inline))

// Promises the compiler that no iteration depends on another one. out == own is an
// ordinary case and keeps the promise. Without the promise the compiler would check
// whether the arrays overlap, and run a scalar loop if they do, as for out == own.
#if defined(__clang__)
#define RINGJAX_VECTOR_LOOP _Pragma("clang loop vectorize(assume_safety)")
#else
#define RINGJAX_VECTOR_LOOP _Pragma("GCC ivdep")
#endif

namespace ringjax::kernels {

// Element types: how a value is stored, the type for computing, and the conversions.
template <typename T>
struct Same {
  using Stored = T;
  using Value = T;
  RINGJAX_INLINE static T Widen(T v) { return v; }
  RINGJAX_INLINE static T Narrow(T v) { return v; }
};
struct Half {
  using Stored = uint16_t;
  using Value = float;
  RINGJAX_INLINE static float Widen(uint16_t v) { return HalfToFloat(v); }
  RINGJAX_INLINE static uint16_t Narrow(float v) { return FloatToHalf(v); }
  RINGJAX_INLINE static uint16_t Narrow(double v) { return DoubleToHalf(v); }
};
struct BFloat16 {
  using Stored = uint16_t;
  using Value = float;
  RINGJAX_INLINE static float Widen(uint16_t v) { return BFloat16ToFloat(v); }
  RINGJAX_INLINE static uint16_t Narrow(float v) { return FloatToBFloat16(v); }
  RINGJAX_INLINE static uint16_t Narrow(double v) { return DoubleToBFloat16(v); }
};
struct Bool {
  using Stored = uint8_t;
  using Value = uint8_t;
  RINGJAX_INLINE static uint8_t Widen(uint8_t v) { return v != 0 ? 1 : 0; }
  RINGJAX_INLINE static uint8_t Narrow(uint8_t v) { return v != 0 ? 1 : 0; }
};

using F32 = Same<float>;
using F64 = Same<double>;

// Calls `loop` with an object of the element type of `dtype`, which is a float.
template <typename Loop>
RINGJAX_INLINE void ByFloat(DType dtype, const Loop& loop) {
  switch (dtype) {
    case DType::kF16:
      return loop(Half{});
    case DType::kBF16:
      return loop(BFloat16{});
    case DType::kF32:
      return loop(F32{});
    default:
      return loop(F64{});
  }
}

// Load and store element `i` at any alignment.
template <typename E>
RINGJAX_INLINE typename E::Stored LoadAs(const void* base, size_t i) {
  typename E::Stored v;
  std::memcpy(&v, static_cast<const char*>(base) + i * sizeof(v), sizeof(v));
  return v;
}
template <typename E>
RINGJAX_INLINE void StoreAs(void* base, size_t i, typename E::Stored v) {
  std::memcpy(static_cast<char*>(base) + i * sizeof(v), &v, sizeof(v));
}

// The type in which T is added and multiplied. Integers use an unsigned type, so that
// they wrap around; C++ would promote narrow ones to int, whose overflow is undefined.
template <typename T>
using Modular =
    std::conditional_t<std::is_integral_v<T>,
                       std::conditional_t<(sizeof(T) > 4), uint64_t, uint32_t>, T>;

struct Add {
  template <typename T>
  RINGJAX_INLINE static T Apply(T a, T b) {
    return static_cast<T>(static_cast<Modular<T>>(a) + static_cast<Modular<T>>(b));
  }
};
struct Multiply {
  template <typename T>
  RINGJAX_INLINE static T Apply(T a, T b) {
    return static_cast<T>(static_cast<Modular<T>>(a) * static_cast<Modular<T>>(b));
  }
};
struct Or {
  RINGJAX_INLINE static uint8_t Apply(uint8_t a, uint8_t b) { return a | b; }
};
struct And {
  RINGJAX_INLINE static uint8_t Apply(uint8_t a, uint8_t b) { return a & b; }
};

template <typename T>
using BitsFor = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;

// If an operand is NaN, the result is NaN, as in numpy. Of the zeros -0 and +0, Minimum
// returns -0 and Maximum +0 regardless of the order, so that ranks that exchange the
// operands get the same bits.
struct Minimum {
  template <typename T>
  RINGJAX_INLINE static T Apply(T a, T b) {
    if constexpr (std::is_integral_v<T>) {
      return a < b ? a : b;
    } else {
      using Bits = BitsFor<T>;
      const T either =
          std::bit_cast<T>(std::bit_cast<Bits>(a) | std::bit_cast<Bits>(b));
      const T less = a < b ? a : b;
      const T chosen = a == b ? either : less;
      return a != a ? a : chosen;
    }
  }
};
struct Maximum {
  template <typename T>
  RINGJAX_INLINE static T Apply(T a, T b) {
    if constexpr (std::is_integral_v<T>) {
      return a > b ? a : b;
    } else {
      using Bits = BitsFor<T>;
      const T either =
          std::bit_cast<T>(std::bit_cast<Bits>(a) & std::bit_cast<Bits>(b));
      const T more = a > b ? a : b;
      const T chosen = a == b ? either : more;
      return a != a ? a : chosen;
    }
  }
};

// Computes out = own op received, with `own` and `out` in type T, `received` in type W.
template <typename T, typename W, typename Op>
RINGJAX_INLINE void CombinePlain(void* out, const void* own, const void* received,
                                 size_t n) {
  using V = typename T::Value;
  RINGJAX_VECTOR_LOOP
  for (size_t i = 0; i < n; ++i) {
    const V a = T::Widen(LoadAs<T>(own, i));
    const V b = static_cast<V>(W::Widen(LoadAs<W>(received, i)));
    StoreAs<T>(out, i, T::Narrow(Op::Apply(a, b)));
  }
}

// Multiplies complex numbers by the textbook formula. The compiler's own product treats
// infinities specially, which needs branches.
template <typename T>
RINGJAX_INLINE void MultiplyComplex(void* out, const void* own, const void* received,
                                    size_t n) {
  using E = Same<T>;
  RINGJAX_VECTOR_LOOP
  for (size_t i = 0; i < n; ++i) {
    const T a = LoadAs<E>(own, 2 * i), b = LoadAs<E>(own, 2 * i + 1);
    const T c = LoadAs<E>(received, 2 * i), d = LoadAs<E>(received, 2 * i + 1);
    StoreAs<E>(out, 2 * i, a * c - b * d);
    StoreAs<E>(out, 2 * i + 1, a * d + b * c);
  }
}

// The factors that one loop over floats applies. The defaults change nothing.
template <typename V>
struct Factors {
  V before = 1;        // multiplies this rank's contribution
  V after = 1;         // multiplies the result
  V divisor = 1;       // divides the result
  bool round = false;  // rounds the result to the wire dtype
};

template <typename T, typename V>
RINGJAX_INLINE V ScaledOwn(const void* own, size_t i, const Factors<V>& f) {
  return T::Widen(LoadAs<T>(own, i)) * f.before;
}
template <typename T, typename W, typename V>
RINGJAX_INLINE void Finish(void* out, size_t i, V v, const Factors<V>& f) {
  v = v * f.after / f.divisor;
  if constexpr (!std::is_same_v<T, W>) {
    // A mask selects the result, because a condition would prevent vectorisation.
    using Bits = BitsFor<V>;
    const Bits keep = f.round ? Bits{0} : ~Bits{0};
    const V rounded = static_cast<V>(W::Widen(W::Narrow(v)));
    v = std::bit_cast<V>((std::bit_cast<Bits>(v) & keep) |
                         (std::bit_cast<Bits>(rounded) & ~keep));
  }
  StoreAs<T>(out, i, T::Narrow(v));
}

template <typename T, typename W, typename Op>
RINGJAX_INLINE void CombineScaled(void* out, const void* own, const void* received,
                                  size_t n, const Factors<typename T::Value> f) {
  using V = typename T::Value;
  RINGJAX_VECTOR_LOOP
  for (size_t i = 0; i < n; ++i) {
    const V b = static_cast<V>(W::Widen(LoadAs<W>(received, i)));
    Finish<T, W>(out, i, Op::Apply(ScaledOwn<T>(own, i, f), b), f);
  }
}

template <typename T, typename W>
RINGJAX_INLINE void Rescale(void* out, const void* own, size_t n,
                            const Factors<typename T::Value> f) {
  RINGJAX_VECTOR_LOOP
  for (size_t i = 0; i < n; ++i) Finish<T, W>(out, i, ScaledOwn<T>(own, i, f), f);
}

template <typename T, typename W>
RINGJAX_INLINE void Narrow(void* wire, const void* own, size_t n,
                           typename T::Value before) {
  RINGJAX_VECTOR_LOOP
  for (size_t i = 0; i < n; ++i)
    StoreAs<W>(wire, i, W::Narrow(LoadAs<T>(own, i) * before));
}

template <typename T, typename W>
RINGJAX_INLINE void Widen(void* out, const void* wire, size_t n) {
  RINGJAX_VECTOR_LOOP
  for (size_t i = 0; i < n; ++i)
    StoreAs<T>(out, i, static_cast<typename T::Value>(W::Widen(LoadAs<W>(wire, i))));
}

// Truncates toward zero. Values out of range become the nearest limit, NaN becomes 0.
template <typename T>
RINGJAX_INLINE T Truncated(double v) {
  constexpr T lowest = std::numeric_limits<T>::lowest();
  constexpr T highest = std::numeric_limits<T>::max();
  // `highest` as a double is exact for narrow types. For 64 bits it is rounded up to a
  // power of two, so the comparison must be `>=` to keep the cast below in range.
  if (v >= static_cast<double>(highest)) return highest;
  if (v <= static_cast<double>(lowest)) return lowest;
  return v != v ? T{0} : static_cast<T>(v);
}

// Scales integers: multiplies them by `factor` in double, truncates, then divides them
// by `divisor` as integers.
template <typename T>
RINGJAX_INLINE void RescaleIntegers(void* out, const void* in, size_t n, double factor,
                                    int64_t divisor) {
  using Wide = std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>;
  for (size_t i = 0; i < n; ++i) {
    T v = LoadAs<Same<T>>(in, i);
    if (factor != 1.0) v = Truncated<T>(static_cast<double>(v) * factor);
    if (divisor != 1)
      v = static_cast<T>(static_cast<Wide>(v) / static_cast<Wide>(divisor));
    StoreAs<Same<T>>(out, i, v);
  }
}

}  // namespace ringjax::kernels
