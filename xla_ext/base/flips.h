// Flips: bits that a test flips in data which are read part by part and must not be
// changed, such as memory that other ranks read, too. See FlipAtFailpoint.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/failpoint.h"

namespace ringjax {

class Flips {
 public:
  // Counts a passage of `point`, in which `bytes` bytes will be read. If the point is
  // armed, any of their bits can be the one to flip.
  void Start(Failpoint point, uint64_t bytes) {
    seen_ = 0;
    bits_.clear();
    if (IsArmed(point)) [[unlikely]]
      bits_ = HitFlip(point, bytes);
  }
  // Returns the next `bytes` bytes: `part`, or a copy with the flipped bits, which is
  // valid until the next call.
  const void* Next(const void* part, size_t bytes) {
    return bits_.empty() ? part : Flipped(part, bytes);
  }

 private:
  const void* Flipped(const void* part, size_t bytes);

  std::vector<uint64_t> bits_;
  uint64_t seen_ = 0;  // bytes that were read since Start
  std::vector<uint8_t> copy_;
};

}  // namespace ringjax
