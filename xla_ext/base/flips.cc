// Implements Flips. See flips.h.
#include "base/flips.h"

namespace ringjax {

const void* Flips::Flipped(const void* part, size_t bytes) {
  const auto* from = static_cast<const uint8_t*>(part);
  copy_.assign(from, from + bytes);
  for (const uint64_t bit : bits_)
    if (bit / 8 >= seen_ && bit / 8 < seen_ + bytes)
      copy_[bit / 8 - seen_] ^= static_cast<uint8_t>(1u << bit % 8);
  seen_ += bytes;
  return copy_.data();
}

}  // namespace ringjax
