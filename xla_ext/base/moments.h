// Dot products of two vectors, and their weighted sum: what an adaptive summation needs
// beside base/reduce.h. No algorithm here: that is engine/call/adasum.h.
//
// Floats only. Products and their sums are double (exact products for all but f64),
// added in an order that depends on nothing but `n`, so that a CPU of another
// generation finds the same bits. Any alignment; n may be 0.
#pragma once

#include "base/dtype.h"

namespace ringjax {

struct Moments {
  double ab = 0, aa = 0, bb = 0;  // a.b, |a|^2, |b|^2
};

// Adds those of n elements of `a` and `b`.
void AddMoments(const void* a, const void* b, size_t n, DType dtype, Moments* moments);

// out = wa a + wb b, rounded once: computed in double, or for 16-bit types in float.
// `out` may be `a` or `b`.
void AddWeighted(void* out, const void* a, double wa, const void* b, double wb,
                 size_t n, DType dtype);

}  // namespace ringjax
