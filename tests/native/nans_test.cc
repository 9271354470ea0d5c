// If each rank computes a sum by itself, NaNs must still have equal bits on all ranks.
#include <cstring>
#include <vector>

#include "base/cpu_level.h"
#include "base/reduce.h"
#include "check.h"

namespace ringjax {
namespace {

template <typename Bits>
void CheckUnified(DType dtype, std::vector<Bits> values,
                  const std::vector<Bits>& wanted) {
  // Repeat the values, because a loop over vectors handles the last few values alone.
  const auto repeat = [](std::vector<Bits> all) {
    const std::vector<Bits> once = all;
    for (int i = 0; i < 10; ++i) all.insert(all.end(), once.begin(), once.end());
    return all;
  };
  values = repeat(values);
  std::vector<std::byte> memory(values.size() * sizeof(Bits) + 1);
  std::memcpy(memory.data() + 1, values.data(), memory.size() - 1);  // not aligned
  UnifyNans(memory.data() + 1, (memory.size() - 1) / Width(dtype), dtype);
  std::memcpy(values.data(), memory.data() + 1, memory.size() - 1);
  CHECK(values == repeat(wanted));
}

void CheckAllTypes() {
  CheckUnified<uint16_t>(DType::kF16, {0xfe01, 0x7c01, 0x7c00, 0xfc00, 0x8000, 0x3c00},
                         {0x7e00, 0x7e00, 0x7c00, 0xfc00, 0x8000, 0x3c00});
  CheckUnified<uint16_t>(DType::kBF16, {0xffc1, 0x7f81, 0x7f80, 0xff80, 0x3f80},
                         {0x7fc0, 0x7fc0, 0x7f80, 0xff80, 0x3f80});
  const std::vector<uint32_t> floats = {0xffc00000, 0x7f800001, 0x7f800000, 0xff7fffff};
  const std::vector<uint32_t> found = {0x7fc00000, 0x7fc00000, 0x7f800000, 0xff7fffff};
  CheckUnified(DType::kF32, floats, found);
  CheckUnified(DType::kC64, floats, found);
  const uint64_t infinity = uint64_t{0x7ff} << 52, nan = uint64_t{0xfff} << 51;
  const uint64_t sign = uint64_t{1} << 63;
  for (const DType dtype : {DType::kF64, DType::kC128})
    CheckUnified<uint64_t>(dtype, {infinity + 1, sign | nan, sign | infinity, 1},
                           {nan, nan, sign | infinity, 1});
  CheckUnified<uint32_t>(DType::kI32, {0xffc00000}, {0xffc00000});
}

TEST(AllNansGetTheSameBitsAndNothingElseChanges) {
  for (CpuLevel level : {CpuLevel::kBase, CpuLevel::kV3, CpuLevel::kV4}) {
    const LevelForTests forced(level);
    CheckAllTypes();
  }
}

}  // namespace
}  // namespace ringjax
