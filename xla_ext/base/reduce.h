// The only arithmetic in the library: combine, encode, decode, scale. Element types,
// wire types and scaling meet here, so that every transport and algorithm moves bytes.
//
// A value of `dtype` travels as `wire` (the same type unless gradients are compressed).
// f16 and bf16 are computed in f32 and rounded to nearest even. Integers wrap around;
// scaling them computes in double and truncates toward zero, as Horovod does; `divisor`
// divides them exactly. bool: Sum and Max are or, Product and Min are and.
// Every function accepts n == 0 and any alignment, and picks SIMD code for the CPU that
// runs it. Pointers may be equal (in place) but must not overlap otherwise. Denormals
// are numbers like others, whatever mode the calling thread is in (base/float_mode.h).
#pragma once

#include "base/dtype.h"

namespace ringjax {

struct Arithmetic {
  DType dtype = DType::kF32;
  DType wire = DType::kF32;      // == dtype, or kF16/kBF16 for a kF32/kF64 dtype
  ReduceOp op = ReduceOp::kSum;  // kAverage is kSum with a divisor
  double prescale = 1.0;         // multiplies each rank's own contribution
  double postscale = 1.0;        // multiplies the finished result
  int64_t divisor = 1;           // divides the finished result (Average: the size)

  bool compressed() const { return wire != dtype; }
  bool scales_first() const { return prescale != 1.0; }
  bool scales_last() const { return postscale != 1.0 || divisor != 1; }
};

// out = finish(scale(own) op received): `own` and `out` in dtype, `received` in wire.
// `first`: own is the untouched contribution, so prescale applies to it.
// `last`: the result is complete: postscale and divisor apply, and it is rounded to
// what the wire can carry, so that all ranks end with the same bits.
void Combine(void* out, const void* own, const void* received, size_t n,
             const Arithmetic& a, bool first, bool last);

// wire <- dtype; prescales if `first`.
void Encode(void* wire, const void* own, size_t n, const Arithmetic& a, bool first);

// dtype <- wire.
void Decode(void* out, const void* wire, size_t n, const Arithmetic& a);

// out = own, prescaled if `first`, finished if `last` (as in Combine).
void CopyScaled(void* out, const void* own, size_t n, const Arithmetic& a, bool first,
                bool last);

// Gives every NaN the same bits. Processors keep the bits of one of two NaNs, and which
// one depends on how the loop was compiled and where it ends: where each rank adds up
// all values by itself, ranks would end with different bits.
void UnifyNans(void* values, size_t n, DType dtype);

// True if Encode(first) is a plain copy, so that bytes can go out as they are.
inline bool IsPlain(const Arithmetic& a, bool first) {
  return !a.compressed() && !(first && a.scales_first());
}

}  // namespace ringjax
