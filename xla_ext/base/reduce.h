// The arithmetic of all collectives: combine, encode, decode, scale. (Adasum also uses
// base/moments.h.) Only these functions handle element types, wire dtypes and scaling,
// so transports and algorithms just move bytes.
//
// A value of type `dtype` is sent as type `wire`, which is `dtype` unless gradients are
// compressed. f16 and bf16 are computed in f32 and rounded to nearest even. Integers
// wrap around; they are scaled in double and truncated toward zero, as in Horovod, and
// `divisor` divides them as integers. For bool, Sum and Max are "or", Product and Min
// are "and". Every function accepts n == 0 and any alignment, and chooses SIMD code for
// the present CPU. Pointers may be equal (in place) but must not overlap otherwise.
// Denormals are not flushed, regardless of the thread's mode (base/float_mode.h).
#pragma once

#include "base/dtype.h"

namespace ringjax {

struct Arithmetic {
  DType dtype = DType::kF32;
  DType wire = DType::kF32;      // == dtype, or kF16/kBF16 for a kF32/kF64 dtype
  ReduceOp op = ReduceOp::kSum;  // kAverage is kSum with a divisor
  double prescale = 1.0;         // multiplies each rank's contribution
  double postscale = 1.0;        // multiplies the finished result
  int64_t divisor = 1;           // divides the finished result (Average: the size)

  bool compressed() const { return wire != dtype; }
  bool scales_first() const { return prescale != 1.0; }
  bool scales_last() const { return postscale != 1.0 || divisor != 1; }
};

// Computes out = finish(scale(own) op received), with `own` and `out` in dtype and
// `received` in wire. `a.op` must be a sum, minimum, maximum or product.
// `first`: `own` is this rank's unchanged contribution, so prescale applies to it.
// `last`: the result is complete. Postscale and divisor apply, and the result is
// rounded to the wire dtype, so that this rank ends with the same bits as the ranks
// that receive the result.
void Combine(void* out, const void* own, const void* received, size_t n,
             const Arithmetic& a, bool first, bool last);

// Converts `n` values from dtype to wire; applies prescale if `first`.
void Encode(void* wire, const void* own, size_t n, const Arithmetic& a, bool first);

// Converts `n` values from wire to dtype.
void Decode(void* out, const void* wire, size_t n, const Arithmetic& a);

// Copies `own` to `out`; applies prescale if `first`, and finishes the result as
// Combine does if `last`.
void CopyScaled(void* out, const void* own, size_t n, const Arithmetic& a, bool first,
                bool last);

// Gives every NaN the same bits. An operation on two NaNs returns the bits of one of
// them; which one depends on the compiled loop and on the element's position in it.
// Without UnifyNans, ranks that each reduce all values by themselves could end with
// different bits.
void UnifyNans(void* values, size_t n, DType dtype);

// Returns whether Encode is a plain copy, so that the bytes can be sent as they are.
inline bool IsPlain(const Arithmetic& a, bool first) {
  return !a.compressed() && !(first && a.scales_first());
}

}  // namespace ringjax
