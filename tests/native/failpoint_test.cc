// Failpoints that flip bits. tests/unit/test_failpoints.py tests the other actions.
#include "base/failpoint.h"

#include <algorithm>
#include <array>

#include "base/flips.h"
#include "check.h"

namespace ringjax {
namespace {

TEST(AFlipChangesOneBitAtItsPassage) {
  std::array<uint8_t, 4> memory = {};
  const auto pass = [&] {
    FlipAtFailpoint(Failpoint::kExactResult, memory.data(), memory.size());
    return memory;
  };
  CHECK((pass() == std::array<uint8_t, 4>{}));  // nothing is armed
  CHECK(ArmFailpoint("exact.result", "flip", 17, 2).ok());
  CHECK((pass() == std::array<uint8_t, 4>{}));
  FlipAtFailpoint(Failpoint::kExactResult, nullptr, 0);  // counts no passage
  CHECK((pass() == std::array<uint8_t, 4>{0, 0, 2, 0}));
  CHECK(ArmFailpoint("exact.result", "flip", 32 + 9, 1).ok());  // modulo 32 bits
  CHECK((pass() == std::array<uint8_t, 4>{0, 2, 2, 0}));
  CHECK((pass() == std::array<uint8_t, 4>{0, 2, 2, 0}));
}

TEST(AFlipInDataThatAreReadInPartsHitsItsPart) {
  const std::array<uint8_t, 6> data = {1, 2, 3, 4, 5, 6};
  Flips flips;
  const auto read = [&] {
    flips.Start(Failpoint::kExactSum, data.size());
    std::array<uint8_t, 6> seen = {};
    for (size_t at = 0; at < data.size(); at += 2) {
      const auto* part = static_cast<const uint8_t*>(flips.Next(&data[at], 2));
      std::copy_n(part, 2, &seen[at]);
    }
    return seen;
  };
  CHECK(read() == data);  // nothing is armed
  CHECK(flips.Next(data.data(), 2) == data.data());
  CHECK(ArmFailpoint("exact.sum", "flip", 8 * 5 + 3, 1).ok());
  CHECK(ArmFailpoint("exact.sum", "flip", 8 * 6 * 9 + 7, 2).ok());  // modulo 48 bits
  CHECK((read() == std::array<uint8_t, 6>{1, 2, 3, 4, 5, 14}));
  CHECK((read() == std::array<uint8_t, 6>{129, 2, 3, 4, 5, 6}));
  CHECK(read() == data);
}

}  // namespace
}  // namespace ringjax
