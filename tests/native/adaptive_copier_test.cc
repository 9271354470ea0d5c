// Copies for other cores: both kinds of stores copy the same bytes, and the copier
// finds the faster kind on machines whose cores share a cache, share none, or change.
#include "transport/adaptive_copier.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "check.h"
#include "local_world.h"

namespace ringjax {
namespace {

TEST(BothKindsOfStoresCopyTheSameBytes) {
  std::vector<unsigned char> from((1 << 20) + 200), to(from.size() + 200);
  for (size_t i = 0; i < from.size(); ++i)
    from[i] = static_cast<unsigned char>(i % 251);
  for (const bool non_temporal : {false, true}) {
    const Override<bool> how(&always_non_temporal, non_temporal);
    AdaptiveCopier copier;
    for (const size_t bytes : {0, 1, 4095, 4096, 4097, 65600, 1 << 20})
      for (const size_t offset : {0, 1, 63, 64, 100}) {
        std::fill(to.begin(), to.end(), 255);
        copier.Copy(&to[offset], &from[100 - offset], bytes);
        CHECK(std::memcmp(&to[offset], &from[100 - offset], bytes) == 0);
        CHECK(std::all_of(to.begin(), to.begin() + offset,
                          [](unsigned char c) { return c == 255; }));
        CHECK_EQ(to[offset + bytes], 255);
        if (bytes >= AdaptiveCopier::kMinBytes)
          CHECK_EQ(copier.non_temporal() || !non_temporal, true);
      }
  }
}

// A writer on a simulated machine, and the number of its non-temporal copies.
class Machine {
 public:
  int Write(int count, double ordinary, double non_temporal, size_t bytes = 64 << 10) {
    int times = 0;
    for (int i = 0; i < count; ++i) {
      const bool chosen = copier_.IsNonTemporal(bytes);
      times += chosen;
      // Every fifth copy is interrupted and takes 20 times as long.
      copier_.Record(bytes, (chosen ? non_temporal : ordinary) *
                                static_cast<double>(bytes) * (i % 5 == 2 ? 20 : 1));
    }
    return times;
  }
  bool IsNonTemporal(size_t bytes) const { return copier_.IsNonTemporal(bytes); }

 private:
  AdaptiveCopier copier_;
};

TEST(TheCopierFindsOutWhetherCoresAreFarApart) {
  Machine near;
  CHECK(near.Write(5000, 0.1, 0.04) < 80);
  Machine far;
  CHECK(far.Write(5000, 0.4, 0.04) > 4900);
  Machine changing;
  changing.Write(2000, 0.03, 0.04);
  CHECK(changing.Write(100, 0.4, 0.04) >= 85);    // the change is detected at once
  CHECK(changing.Write(2000, 0.03, 0.04) < 600);  // rare trials
  CHECK(changing.Write(100, 0.4, 0.04) >= 85);
}

// Long copies read memory and short ones the caches, so each size has its own choice.
TEST(EachSizeIsMeasuredSeparately) {
  Machine machine;
  for (int i = 0; i < 200; ++i) {
    machine.Write(1, 0.03, 0.04, 64 << 10);
    machine.Write(1, 0.4, 0.04, 1 << 20);
    machine.Write(1, 0.4, 0.04, 5 << 20);
    machine.Write(1, 0.1, 0.05, AdaptiveCopier::kMinBytes);
  }
  CHECK(!machine.IsNonTemporal(64 << 10));
  CHECK(machine.IsNonTemporal(1 << 20) && machine.IsNonTemporal(5 << 20) &&
        machine.IsNonTemporal(~size_t{0}));
  CHECK(!machine.IsNonTemporal(AdaptiveCopier::kMinBytes) && !machine.IsNonTemporal(0));
}

}  // namespace
}  // namespace ringjax
