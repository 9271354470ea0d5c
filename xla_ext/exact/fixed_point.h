// Sums of floats in 64-bit fixed point: they depend neither on the order of their terms
// nor on the grouping. An element is an int64, a multiple of 2^unit. All leaves of a
// tree lie one after the other in a flat array; a place is an index in it.
//
// The functions compute the same bits at every CPU level, and the same as
// ringjax/exact/fixed_point.py. The caller takes care that no sum overflows: with
// `width` bits a term, 2^(62 - width) terms fit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/dtype.h"

namespace ringjax::exact {

// The lowest unit. With it denormal floats are rounded to 0, whether or not a thread
// flushes them.
inline constexpr int kLowestUnit = -125;

// The sum of the elements, and that of element times 2 i + 1 for the place i, modulo
// 2^64. The checksum of a sum of arrays is the sum of the arrays' checksums. Any change
// within one element is seen, because 2 i + 1 is odd; the weights see two exchanged
// elements.
struct Checksum {
  uint64_t plain = 0, weighted = 0;
  bool operator==(const Checksum&) const = default;
  Checksum& operator+=(const Checksum& other) {
    plain += other.plain, weighted += other.weighted;
    return *this;
  }
};

// One call of Add has found this in `values`, and has added this checksum.
struct Added {
  uint64_t too_large = 0;   // elements of at least 2^(unit + width), added as 0
  uint64_t not_finite = 0;  // NaN, and what is infinite as float32; added as 0
  float top = 0;            // the largest finite magnitude, 0 if it is denormal
  Checksum checksum;
};

// Adds `values`, rounded to multiples of 2^unit (halves to even), to `sums`. `dtype` is
// a type of floats, and `first` is the place of sums[0].
Added Add(const void* values, DType dtype, size_t n, int unit, int width,
          uint64_t first, int64_t* sums);

// The sum of some pieces, in memory of the caller; see Accumulator in
// ringjax/exact/accumulator.py. Leaf i has counts[i] (too large, not finite) and
// tops[i].
struct Accumulator {
  int64_t* sums;
  int32_t (*counts)[2];
  float* tops;
  Checksum* checksum;
};

// Adds the `n` values of leaf `index`, whose first element has the place `first`.
// `values` are changed only by the failpoint exact.gradient.
void AddLeaf(void* values, DType dtype, size_t n, size_t index, int unit, int width,
             uint64_t first, const Accumulator& to);

Checksum Check(const int64_t* sums, size_t n, uint64_t first);

// Adds `more` to `own`, unless `more` is null, and writes the means: the sums times
// 2^unit / pieces, rounded to double, then the product, then to float. Means that would
// be denormal become 0. Returns the checksum of the sums; `first` is the place of the
// first one.
Checksum Decode(const int64_t* own, const int64_t* more, size_t n, uint64_t first,
                int unit, int pieces, float* mean);

// One leaf: its elements in the flat array, and its unit.
struct Leaf {
  uint64_t first = 0, n = 0;
  int unit = 0;
};

// Does the same for the elements from place `first` on. `leaves` are in the order of
// their places and cover these elements.
Checksum DecodeLeaves(const int64_t* own, const int64_t* more, uint64_t first, size_t n,
                      std::span<const Leaf> leaves, int pieces, float* mean);

}  // namespace ringjax::exact
