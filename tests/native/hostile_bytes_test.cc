// Damaged bytes from other processes, for the time that a test may take. fuzz_targets.h
// explains the targets and what must never happen. `make fuzz` makes millions of runs.
#include <algorithm>
#include <chrono>

#include "check.h"
#include "fuzz_targets.h"

namespace ringjax::fuzz {
namespace {

constexpr size_t kInputs = 3000, kMost = 4096;
constexpr std::chrono::seconds kLongest(2);

void Try(const char* name) {
  const std::vector<Target> all = AllTargets();
  const auto target = std::find_if(all.begin(), all.end(), [name](const Target& t) {
    return std::string_view(t.name) == name;
  });
  CHECK(target != all.end());
  if (target == all.end()) return;
  const std::vector<std::string> seeds = target->seeds();
  for (const std::string& seed : seeds) target->run(seed);
  Random random(20);
  const auto start = std::chrono::steady_clock::now();
  for (size_t i = 0; i < kInputs; ++i) {
    if (std::chrono::steady_clock::now() - start > kLongest) break;
    std::string input = seeds[random() % seeds.size()];
    for (uint64_t n = 1 + random() % 5; n > 0; --n)
      Damage(&input, seeds[random() % seeds.size()], kMost, &random);
    target->run(input);
  }
}

TEST(DamagedMessagesAreRead) { Try("message"); }
TEST(DamagedNegotiationIsAgreedOn) { Try("negotiation"); }
TEST(DamagedTextsAreCompared) { Try("texts"); }
TEST(DamagedFramesEndTheCall) { Try("frames"); }
TEST(DamagedSegmentsEndTheCall) { Try("segment"); }
TEST(DamagedRingsAreNoticed) { Try("ring"); }
TEST(DamagedHeartbeatsLoseOnlyExistingRanks) { Try("heartbeat"); }

}  // namespace
}  // namespace ringjax::fuzz
