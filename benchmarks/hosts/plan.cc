// Prints the milliseconds that a rank needs for the plan of an allreduce by a ring:
// the schedule, and its dependencies. counts.py compiles this program.
#include "engine/call/plan.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "collective/table.h"

int main(int count, char** words) {
  using namespace ringjax;
  using Clock = std::chrono::steady_clock;
  if (count != 3) return 2;
  const int size = std::atoi(words[1]), on_host = std::atoi(words[2]);
  std::vector<int> hosts(size);
  for (int rank = 0; rank < size; ++rank) hosts[rank] = rank / on_host;
  const Problem problem{Collective::kAllreduce, 0, {uint64_t{1} << 24}};
  const Algorithm* ring = Find(Collective::kAllreduce, "ring");
  double least = 1e9;
  for (int turn = 0; turn < 9; ++turn) {
    const auto start = Clock::now();
    const Topology topology{size / 2, size, hosts, size == on_host};
    const Plan plan = Compile(ring->generate(problem, topology), size, true);
    const std::chrono::duration<double, std::milli> spent = Clock::now() - start;
    if (plan.peers.size() != 2) return 1;
    if (spent.count() < least) least = spent.count();
  }
  std::printf("%.3f\n", least);
}
