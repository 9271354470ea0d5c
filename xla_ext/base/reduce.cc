// Chooses the loop for a dtype, wire dtype, operation and scaling. The loops are in
// reduce_kernels.h; ByLevel compiles them for several levels of x86-64.
#include "base/reduce.h"

#include <algorithm>

#include "base/cpu_level.h"
#include "base/float_mode.h"
#include "base/half_blocks.h"
#include "base/reduce_kernels.h"
#include "base/status.h"

namespace ringjax {
namespace {

using namespace kernels;

// The operands of one loop: `n` elements each.
struct Operands {
  void* out;
  const void* own;
  const void* received;
  size_t n;
};

// Calls `loop` with the reduce operation as a type.
template <typename Loop>
RINGJAX_INLINE void ByOp(ReduceOp op, const Loop& loop) {
  switch (op) {
    case ReduceOp::kMin:
      return loop(Minimum{});
    case ReduceOp::kMax:
      return loop(Maximum{});
    case ReduceOp::kProduct:
      return loop(Multiply{});
    default:
      return loop(Add{});
  }
}

// Calls `loop` with the integer type of `dtype`; bool counts as u8.
template <typename Loop>
RINGJAX_INLINE void ByInteger(DType dtype, const Loop& loop) {
  switch (dtype) {
    case DType::kI8:
      return loop(int8_t{});
    case DType::kI16:
      return loop(int16_t{});
    case DType::kI32:
      return loop(int32_t{});
    case DType::kI64:
      return loop(int64_t{});
    case DType::kBool:
    case DType::kU8:
      return loop(uint8_t{});
    case DType::kU16:
      return loop(uint16_t{});
    case DType::kU32:
      return loop(uint32_t{});
    default:
      return loop(uint64_t{});
  }
}

// Calls `loop` with the element types of a.dtype, f32 or f64, and of a.wire, which has
// 16 bits.
template <typename Loop>
RINGJAX_INLINE void ByCompression(const Arithmetic& a, const Loop& loop) {
  const auto with = [&](auto wire) RINGJAX_INLINE_LAMBDA {
    if (a.dtype == DType::kF32) return loop(F32{}, wire);
    loop(F64{}, wire);
  };
  if (a.wire == DType::kF16) return with(Half{});
  with(BFloat16{});
}

// Calls `loop` with the element types of a.dtype, which is a float, and of a.wire.
template <typename Loop>
RINGJAX_INLINE void ByFloats(const Arithmetic& a, const Loop& loop) {
  if (a.compressed()) return ByCompression(a, loop);
  ByFloat(a.dtype, [&](auto type) RINGJAX_INLINE_LAMBDA { loop(type, type); });
}

RINGJAX_INLINE void CombineFloats(const Operands& p, DType dtype, ReduceOp op) {
  ByFloat(dtype, [&](auto type) RINGJAX_INLINE_LAMBDA {
    using T = decltype(type);
    ByOp(op, [&](auto apply) RINGJAX_INLINE_LAMBDA {
      CombinePlain<T, T, decltype(apply)>(p.out, p.own, p.received, p.n);
    });
  });
}

RINGJAX_INLINE void CombineComplexProducts(const Operands& p, DType dtype) {
  if (dtype == DType::kC64) {
    MultiplyComplex<float>(p.out, p.own, p.received, p.n);
  } else {
    MultiplyComplex<double>(p.out, p.own, p.received, p.n);
  }
}

RINGJAX_INLINE void CombineBools(const Operands& p, ReduceOp op) {
  if (op == ReduceOp::kSum || op == ReduceOp::kMax) {
    CombinePlain<Bool, Bool, Or>(p.out, p.own, p.received, p.n);
  } else {
    CombinePlain<Bool, Bool, And>(p.out, p.own, p.received, p.n);
  }
}

// Sums and products wrap around, with the same bits for signed and unsigned types, so
// they are computed in the unsigned type.
RINGJAX_INLINE void CombineIntegers(const Operands& p, DType dtype, ReduceOp op) {
  if (dtype == DType::kBool) return CombineBools(p, op);
  ByInteger(dtype, [&](auto type) RINGJAX_INLINE_LAMBDA {
    ByOp(op, [&](auto apply) RINGJAX_INLINE_LAMBDA {
      using Op = decltype(apply);
      constexpr bool kOrders =
          std::is_same_v<Op, Minimum> || std::is_same_v<Op, Maximum>;
      using T = Same<std::conditional_t<kOrders, decltype(type),
                                        std::make_unsigned_t<decltype(type)>>>;
      CombinePlain<T, T, Op>(p.out, p.own, p.received, p.n);
    });
  });
}

void CombineUnscaled(const Operands& p, DType dtype, ReduceOp op) {
  if (IsFloat(dtype)) return ByLevel<CombineFloats>(p, dtype, op);
  if (IsComplex(dtype)) return ByLevel<CombineComplexProducts>(p, dtype);
  ByLevel<CombineIntegers>(p, dtype, op);
}

// Adds values in the wire dtype to values in `dtype`, without scaling: the loop for
// most steps of a ring with compression, unless CombineHalves can do that step.
RINGJAX_INLINE void AddFromWire(const Operands& p, const Arithmetic& a) {
  ByCompression(a, [&](auto type, auto wire) RINGJAX_INLINE_LAMBDA {
    CombinePlain<decltype(type), decltype(wire), Add>(p.out, p.own, p.received, p.n);
  });
}

template <typename V>
Factors<V> FactorsFor(const Arithmetic& a, bool first, bool last) {
  Factors<V> f;
  if (first) f.before = static_cast<V>(a.prescale);
  if (last) {
    f.after = static_cast<V>(a.postscale);
    f.divisor = static_cast<V>(a.divisor);
    f.round = a.compressed();
  }
  return f;
}

RINGJAX_INLINE void CombineScaledFloats(const Operands& p, const Arithmetic& a,
                                        bool first, bool last) {
  ByFloats(a, [&](auto type, auto wire) RINGJAX_INLINE_LAMBDA {
    using T = decltype(type);
    const auto f = FactorsFor<typename T::Value>(a, first, last);
    ByOp(a.op, [&](auto apply) RINGJAX_INLINE_LAMBDA {
      CombineScaled<T, decltype(wire), decltype(apply)>(p.out, p.own, p.received, p.n,
                                                        f);
    });
  });
}

RINGJAX_INLINE void RescaleFloats(const Operands& p, const Arithmetic& a, bool first,
                                  bool last) {
  ByFloats(a, [&](auto type, auto wire) RINGJAX_INLINE_LAMBDA {
    using T = decltype(type);
    Rescale<T, decltype(wire)>(p.out, p.own, p.n,
                               FactorsFor<typename T::Value>(a, first, last));
  });
}

RINGJAX_INLINE void NarrowFloats(void* wire, const void* own, size_t n,
                                 const Arithmetic& a, double before) {
  ByCompression(a, [&](auto type, auto narrow) RINGJAX_INLINE_LAMBDA {
    using T = decltype(type);
    Narrow<T, decltype(narrow)>(wire, own, n, static_cast<typename T::Value>(before));
  });
}

RINGJAX_INLINE void WidenFloats(void* out, const void* wire, size_t n,
                                const Arithmetic& a) {
  ByCompression(a, [&](auto type, auto narrow) RINGJAX_INLINE_LAMBDA {
    Widen<decltype(type), decltype(narrow)>(out, wire, n);
  });
}

void ScaleIntegers(void* out, const void* in, size_t n, DType dtype, double factor,
                   int64_t divisor) {
  ByInteger(dtype, [&](auto type) {
    RescaleIntegers<decltype(type)>(out, in, n, factor, divisor);
  });
  if (dtype == DType::kBool)
    CombineBools({out, out, out, n}, ReduceOp::kMax);  // makes 0 or 1
}

// Returns the arithmetic of `a` for complex numbers that are treated as pairs of reals.
Arithmetic AsReal(const Arithmetic& a) {
  Arithmetic real = a;
  real.dtype = real.wire = a.dtype == DType::kC64 ? DType::kF32 : DType::kF64;
  return real;
}

void Rescaled(void* out, const void* own, size_t n, const Arithmetic& a, bool first,
              bool last) {
  if (IsComplex(a.dtype)) return Rescaled(out, own, 2 * n, AsReal(a), first, last);
  const Operands p{out, own, nullptr, n};
  if (IsFloat(a.dtype)) return ByLevel<RescaleFloats>(p, a, first, last);
  if (first && a.scales_first()) {
    ScaleIntegers(out, own, n, a.dtype, a.prescale, 1);
    own = out;
  }
  if (last && a.scales_last())
    ScaleIntegers(out, own, n, a.dtype, a.postscale, a.divisor);
}

// Combines integers, or complex numbers with op kProduct, with scaling. No single loop
// combines and scales. So the data are cut into pieces that stay in the L1 cache, and
// each piece is scaled, combined and finished before the next one.
void CombineInPieces(const Operands& p, const Arithmetic& a, bool first, bool last) {
  alignas(64) std::byte scaled[4096];
  const size_t width = Width(a.dtype), step = sizeof(scaled) / width;
  const bool before = first && a.scales_first(), after = last && a.scales_last();
  for (size_t done = 0; done < p.n; done += step) {
    const size_t n = std::min(step, p.n - done), at = done * width;
    std::byte* out = static_cast<std::byte*>(p.out) + at;
    const std::byte* own = static_cast<const std::byte*>(p.own) + at;
    const std::byte* received = static_cast<const std::byte*>(p.received) + at;
    if (before) Rescaled(scaled, own, n, a, true, false);
    CombineUnscaled({out, before ? scaled : own, received, n}, a.dtype, a.op);
    if (after) Rescaled(out, out, n, a, false, true);
  }
}

// Elements that are converted to f32 at a time, so few that they stay in the L1 cache.
constexpr size_t kFloatBlock = 1024;

// Returns arithmetic in f32 with the operation and the factors of `a`, uncompressed.
Arithmetic AsFloats(const Arithmetic& a) {
  Arithmetic floats = a;
  floats.dtype = floats.wire = DType::kF32;
  return floats;
}

// Returns whether CombineHalves can do the arithmetic `a`: the CPU has F16C, and the
// values are f16, or f32 that is sent as f16.
bool UsesF16C(const Arithmetic& a) {
  return a.wire == DType::kF16 && a.dtype != DType::kF64 && ConvertsHalves();
}

const char* At(const void* base, size_t bytes) {
  return static_cast<const char*>(base) + bytes;
}
char* At(void* base, size_t bytes) { return static_cast<char*>(base) + bytes; }

// Combines f16, or f32 that is sent as f16, in blocks that are converted to f32.
void CombineHalves(const Operands& p, const Arithmetic& a, bool first, bool last) {
  alignas(64) float own[kFloatBlock], received[kFloatBlock];
  const Arithmetic floats = AsFloats(a);
  const bool wide = a.dtype == DType::kF32;
  for (size_t done = 0; done < p.n; done += kFloatBlock) {
    const size_t n = std::min(kFloatBlock, p.n - done), at = done * Width(a.dtype);
    WidenHalves(received, At(p.received, done * sizeof(uint16_t)), n);
    if (!wide) WidenHalves(own, At(p.own, at), n);
    void* sums = wide ? At(p.out, at) : static_cast<void*>(own);
    Combine(sums, wide ? At(p.own, at) : static_cast<void*>(own), received, n, floats,
            first, last);
    if (!wide) {
      NarrowHalves(At(p.out, at), own, n);
    } else if (last) {  // rounds the results to the wire dtype
      NarrowHalves(received, sums, n);
      WidenHalves(sums, received, n);
    }
  }
}

// Returns whether a factor, a divisor or rounding to the wire dtype changes values.
bool HasFactors(const Arithmetic& a, bool first, bool last) {
  return (first && a.scales_first()) || (last && (a.scales_last() || a.compressed()));
}

void CheckSupported(const Arithmetic& a) {
  RJ_CHECK(!a.compressed() || ((a.dtype == DType::kF32 || a.dtype == DType::kF64) &&
                               (a.wire == DType::kF16 || a.wire == DType::kBF16)),
           "only f32 and f64 can travel as f16 or bf16");
  RJ_CHECK(a.divisor >= 1, "the divisor must be positive");
}

// Replaces each NaN by `nan`. `infinity` has the bits of +infinity. The bits are signed
// integers, because x86-64-v3 has no instruction that compares unsigned ones.
template <typename Bits>
RINGJAX_INLINE void Unify(void* values, size_t n, Bits infinity, Bits nan) {
  auto* at = static_cast<std::byte*>(values);
  for (size_t i = 0; i < n; ++i, at += sizeof(Bits)) {
    Bits bits;
    std::memcpy(&bits, at, sizeof bits);
    const auto magnitude = static_cast<Bits>(bits & std::numeric_limits<Bits>::max());
    if (magnitude > infinity) bits = nan;
    std::memcpy(at, &bits, sizeof bits);
  }
}

RINGJAX_INLINE void UnifyFloats(void* values, size_t n, DType dtype) {
  switch (dtype) {
    case DType::kF16:
      return Unify<int16_t>(values, n, 0x7c00, 0x7e00);
    case DType::kBF16:
      return Unify<int16_t>(values, n, 0x7f80, 0x7fc0);
    case DType::kF32:
      return Unify<int32_t>(values, n, 0x7f800000, 0x7fc00000);
    default:
      return Unify<int64_t>(values, n, int64_t{0x7ff} << 52, int64_t{0xfff} << 51);
  }
}

}  // namespace

void Combine(void* out, const void* own, const void* received, size_t n,
             const Arithmetic& a, bool first, bool last) {
  CheckSupported(a);
  RJ_CHECK(a.op == ReduceOp::kSum || a.op == ReduceOp::kMin || a.op == ReduceOp::kMax ||
               a.op == ReduceOp::kProduct,
           "an operation that is not elementwise");
  if (n == 0) return;
  const FloatMode mode;
  if (IsComplex(a.dtype)) {
    RJ_CHECK(a.op != ReduceOp::kMin && a.op != ReduceOp::kMax,
             "complex numbers have no order");
    if (a.op == ReduceOp::kSum)
      return Combine(out, own, received, 2 * n, AsReal(a), first, last);
  }
  const Operands p{out, own, received, n};
  if (UsesF16C(a)) return CombineHalves(p, a, first, last);
  const bool has_factors = HasFactors(a, first, last);
  if (!has_factors && !a.compressed()) return CombineUnscaled(p, a.dtype, a.op);
  if (!has_factors && a.op == ReduceOp::kSum) return ByLevel<AddFromWire>(p, a);
  if (IsFloat(a.dtype)) return ByLevel<CombineScaledFloats>(p, a, first, last);
  CombineInPieces(p, a, first, last);
}

void Encode(void* wire, const void* own, size_t n, const Arithmetic& a, bool first) {
  CheckSupported(a);
  if (n == 0) return;
  if (!a.compressed()) return CopyScaled(wire, own, n, a, first, false);
  const FloatMode mode;
  const double before = first ? a.prescale : 1.0;
  if (before == 1.0 && UsesF16C(a)) return NarrowHalves(wire, own, n);
  ByLevel<NarrowFloats>(wire, own, n, a, before);
}

void Decode(void* out, const void* wire, size_t n, const Arithmetic& a) {
  CheckSupported(a);
  if (n == 0) return;
  if (a.compressed()) {
    const FloatMode mode;
    if (UsesF16C(a)) return WidenHalves(out, wire, n);
    return ByLevel<WidenFloats>(out, wire, n, a);
  }
  if (out != wire) std::memcpy(out, wire, n * Width(a.dtype));
}

void CopyScaled(void* out, const void* own, size_t n, const Arithmetic& a, bool first,
                bool last) {
  CheckSupported(a);
  if (n == 0) return;
  if (HasFactors(a, first, last)) {
    const FloatMode mode;
    return Rescaled(out, own, n, a, first, last);
  }
  if (out != own) std::memcpy(out, own, n * Width(a.dtype));
}

void UnifyNans(void* values, size_t n, DType dtype) {
  if (IsComplex(dtype))
    return UnifyNans(values, 2 * n, dtype == DType::kC64 ? DType::kF32 : DType::kF64);
  if (IsFloat(dtype)) ByLevel<UnifyFloats>(values, n, dtype);
}

}  // namespace ringjax
