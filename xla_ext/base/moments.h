// Dot products and weighted sums of two vectors: the arithmetic that Adasum needs in
// addition to base/reduce.h. The algorithm is in engine/call/adasum.h.
//
// `dtype` must be a float type. Products and their sums are computed in double, which
// holds the products of all types but f64 exactly. The order of the additions depends
// only on `n`, so the code for every CPU level computes the same bits. Any alignment is
// accepted, and `n` may be 0.
#pragma once

#include "base/dtype.h"

namespace ringjax {

struct Moments {
  double ab = 0, aa = 0, bb = 0;  // a.b, |a|^2, |b|^2
};

// Adds the moments of the `n` elements of `a` and `b` to `*moments`.
void AddMoments(const void* a, const void* b, size_t n, DType dtype, Moments* moments);

// Computes out = wa a + wb b, in float for the 16-bit types and in double for the
// others, and rounds the result to `dtype`. `out` may be `a` or `b`.
void AddWeighted(void* out, const void* a, double wa, const void* b, double wb,
                 size_t n, DType dtype);

}  // namespace ringjax
