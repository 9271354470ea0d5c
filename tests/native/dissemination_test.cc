// Tests of the steps of a dissemination: all ranks follow them together.
#include "engine/call/dissemination.h"

#include <set>

#include "check.h"

namespace ringjax {
namespace {

std::vector<int> EvenHosts(int hosts, int each) {
  std::vector<int> found;
  for (int r = 0; r < hosts * each; ++r) found.push_back(r / each);
  return found;
}

int StepsUpTo(int count) {
  int steps = 0;
  for (int reach = 1; reach < count; reach *= 2) ++steps;
  return steps;
}

// Makes all steps of all ranks. Returns the most steps of a rank between two hosts.
int Follow(const std::vector<int>& hosts) {
  const int size = static_cast<int>(hosts.size());
  std::vector<Dissemination> all;
  for (int r = 0; r < size; ++r) all.push_back(MakeDissemination({r, size, hosts}));
  std::vector<size_t> known(hosts.size(), 1);
  int most = 0;
  for (size_t step = 0; step < all[0].steps.size(); ++step) {
    for (int r = 0; r < size; ++r) {
      const auto& [to, from, ranks] = all[r].steps[step];
      CHECK(to != r && from != r);
      CHECK_EQ(all[to].steps[step].from, r);
      CHECK_EQ(all[from].steps[step].to, r);
      CHECK_EQ(all[from].steps[step].ranks, ranks);
      CHECK(static_cast<size_t>(ranks) <= known[from]);
      for (int i = 0; i < ranks; ++i)
        CHECK_EQ(all[r].order[known[r] + i], all[from].order[i]);
    }
    for (int r = 0; r < size; ++r) known[r] += all[r].steps[step].ranks;
  }
  for (int r = 0; r < size; ++r) {
    CHECK_EQ(known[r], hosts.size());
    CHECK_EQ(all[r].order[0], r);
    CHECK_EQ(std::set<int>(all[r].order.begin(), all[r].order.end()).size(),
             hosts.size());
    int between = 0;
    for (const auto& step : all[r].steps) between += hosts[step.to] != hosts[r];
    most = std::max(most, between);
  }
  return most;
}

TEST(DisseminationReachesAllRanks) {
  for (int size = 1; size <= 40; ++size) {
    CHECK_EQ(Follow(EvenHosts(1, size)), 0);
    CHECK_EQ(Follow(EvenHosts(size, 1)), StepsUpTo(size));
  }
  for (int hosts = 2; hosts <= 9; ++hosts)
    for (int each = 2; each <= 9; ++each)
      CHECK_EQ(Follow(EvenHosts(hosts, each)), StepsUpTo(hosts));
}

TEST(DisseminationOfUnevenAndMixedHosts) {
  CHECK_EQ(Follow({0, 1, 2, 0, 1, 2, 0, 1, 2}), 2);  // one rank of each host in turn
  CHECK_EQ(Follow({3, 1, 1, 3}), 1);
  CHECK_EQ(Follow({0, 0, 0, 1, 1}), 2);  // in one level
  Follow({0, 0, 1, 2, 2, 2, 3});
}

}  // namespace
}  // namespace ringjax
