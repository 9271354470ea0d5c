// Hash: a fast hash of integers, floating-point numbers and strings. Ranks with the
// same byte order compute the same value. An attacker can construct collisions.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>

namespace ringjax {

// Folds 128-bit products, as wyhash does (Wang Yi, 2019). One word takes only one
// multiplication, because the calls of a training step may have thousands of words.
class Hash {
 public:
  void Add(uint64_t word) {
    const auto product = static_cast<unsigned __int128>(state_ ^ word ^ kOdd) * kFactor;
    // Adding to the state keeps the earlier words even if the product is zero.
    state_ += static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
  }
  void Add(double value) { Add(std::bit_cast<uint64_t>(value)); }
  void Add(std::string_view text) {
    Add(text.size());
    for (size_t i = 0; i < text.size(); i += 8) {
      uint64_t word = 0;
      std::memcpy(&word, text.data() + i, std::min<size_t>(8, text.size() - i));
      Add(word);
    }
  }
  uint64_t value() const { return state_; }

 private:
  static constexpr uint64_t kOdd = 0x9e3779b97f4a7c15ull,
                            kFactor = 0xd1342543de82ef95ull;
  uint64_t state_ = 0x52474a58;
};

}  // namespace ringjax
