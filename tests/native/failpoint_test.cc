// Failpoints that flip bits. tests/unit/test_failpoints.py tests the other actions.
#include "base/failpoint.h"

#include <array>

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

}  // namespace
}  // namespace ringjax
