// SumDecoder: the part of an exchange of exact sums that knows what sums and means are.
// The tiles (tiles.h) only move and add them.
#pragma once

#include <cstdint>

namespace ringjax {

class SumDecoder {
 public:
  virtual ~SumDecoder() = default;
  // Converts `n` complete sums to means. `first` is the place of the first one.
  virtual void Decode(int64_t* sums, uint64_t n, uint64_t first, float* means) = 0;
  // Checks `n` means, from place `first` on, that this rank has received from `owner`.
  virtual void Receive(int owner, float* means, uint64_t n, uint64_t first) = 0;
};

struct PartOfSums {
  uint64_t begin, end;  // places of sums
};

}  // namespace ringjax
