// When a waiting rank leaves its core to another rank, and when it stays.
#include "transport/cpu_placement.h"

#include <sched.h>

#include <memory>
#include <thread>
#include <vector>

#include "check.h"

namespace ringjax {
namespace {

constexpr int kWaits = 32;  // enough for a move

std::shared_ptr<HostMemory> MemoryOf(int ranks) {
  return HostMemory::Local({ranks, 4096, 0});
}

void Wait(CpuPlacement* placement, int core, int times = kWaits) {
  for (int i = 0; i < times; ++i) placement->Check(core);
}

cpu_set_t Allowed() {
  cpu_set_t set;
  CHECK_EQ(sched_getaffinity(0, sizeof set, &set), 0);
  return set;
}

std::vector<int> CoresOf(const cpu_set_t& set) {
  std::vector<int> cores;
  for (int core = 0; core < CPU_SETSIZE; ++core)
    if (CPU_ISSET(static_cast<size_t>(core), &set)) cores.push_back(core);
  return cores;
}

TEST(TheHigherOfTwoRanksOnACoreMovesAndMayUseAllCoresAfterwards) {
  const cpu_set_t before = Allowed();
  const std::vector<int> cores = CoresOf(before);
  const auto memory = MemoryOf(2);
  CpuPlacement zero(memory, 0), one(memory, 1);
  Wait(&zero, cores[0]);
  Wait(&one, cores[0], kWaits - 1);
  CHECK_EQ(one.moves(), 0u);
  one.Check(cores[0]);
  CHECK_EQ(one.moves(), cores.size() > 1 ? 1u : 0u);  // there may be no other core
  Wait(&zero, cores[0]);
  CHECK_EQ(zero.moves(), 0u);
  const cpu_set_t after = Allowed();
  CHECK(CPU_EQUAL(&before, &after));
}

TEST(ARankStaysIfNoLowerRankIsOnItsCore) {
  const std::vector<int> cores = CoresOf(Allowed());
  const auto memory = MemoryOf(3);
  CpuPlacement zero(memory, 0), one(memory, 1), two(memory, 2);
  Wait(&one, cores[0]);  // rank 0 has not waited yet
  Wait(&zero, cores[0] + 1);
  Wait(&two, cores[0] + 2);
  Wait(&one, cores[0]);
  CHECK_EQ(one.moves(), 0u);
  Wait(&two, -1);  // the kernel does not tell the core
  CHECK_EQ(two.moves(), 0u);
}

TEST(ARankOfOneCoreStays) {
  std::thread([] {
    const std::vector<int> cores = CoresOf(Allowed());
    cpu_set_t one_core;
    CPU_ZERO(&one_core);
    CPU_SET(static_cast<size_t>(cores[0]), &one_core);
    CHECK_EQ(sched_setaffinity(0, sizeof one_core, &one_core), 0);
    const auto memory = MemoryOf(2);
    CpuPlacement zero(memory, 0), one(memory, 1);
    Wait(&zero, cores[0]);
    Wait(&one, cores[0], 4 * kWaits);
    CHECK_EQ(one.moves(), 0u);
  }).join();
}

// The words are in memory that peers write.
TEST(WordsOfPeersThatAreNoCoresAreIgnored) {
  const std::vector<int> cores = CoresOf(Allowed());
  const auto memory = MemoryOf(4);
  CpuPlacement zero(memory, 0), three(memory, 3);
  Wait(&zero, cores[0]);
  memory->words(1).core = ~0u;
  memory->words(2).core = CPU_SETSIZE + 1;
  Wait(&three, cores[0]);
  CHECK_EQ(three.moves(), cores.size() > 1 ? 1u : 0u);
}

// Other programs may use all other cores. Then a move does not help, and moves of two
// ranks must not follow each other without a pause.
TEST(MovesThatDoNotHelpBecomeRare) {
  const std::vector<int> cores = CoresOf(Allowed());
  const auto memory = MemoryOf(2);
  CpuPlacement zero(memory, 0), one(memory, 1);
  Wait(&zero, cores[0]);
  const auto start = std::chrono::steady_clock::now();
  Wait(&one, cores[0], 1000 * kWaits);
  const auto passed = std::chrono::steady_clock::now() - start;
  CHECK(one.moves() <=
        1 + static_cast<uint64_t>(passed / std::chrono::milliseconds(1)));
}

}  // namespace
}  // namespace ringjax
