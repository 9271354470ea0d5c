// SumDecoder: the part of an exchange of exact sums that knows what sums and means are.
// The tiles (tiles.h) only move and add them.
#pragma once

#include <cstdint>

namespace ringjax {

class SumDecoder {
 public:
  virtual ~SumDecoder() = default;
  // Begins an exchange in which Decode gets `sums` sums, and Receive `means` means.
  virtual void Expect(uint64_t sums, uint64_t means) = 0;
  // Adds `more` to `own`, unless `more` is null, and converts the `n` complete sums to
  // means. `first` is the place of the first one.
  virtual void Decode(const int64_t* own, const int64_t* more, uint64_t n,
                      uint64_t first, float* means) = 0;
  // Checks `n` means, from place `first` on, that this rank has received from `owner`.
  // Returns the means to keep: `means`, or a copy in which a test has flipped a bit.
  virtual const float* Receive(int owner, const float* means, uint64_t n,
                               uint64_t first) = 0;
};

struct PartOfSums {
  uint64_t begin, end;  // places of sums
};

}  // namespace ringjax
