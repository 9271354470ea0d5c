// Implements MakeDissemination. See dissemination.h.
#include "engine/call/dissemination.h"

#include <algorithm>
#include <map>
#include <numeric>

namespace ringjax {
namespace {

// Returns the ranks of each host, or all ranks as one host if the hosts have different
// numbers of ranks.
std::vector<std::vector<int>> EvenHosts(const std::vector<int>& hosts) {
  std::map<int, size_t> places;  // the places of the hosts in `even`
  std::vector<std::vector<int>> even;
  for (size_t r = 0; r < hosts.size(); ++r) {
    const size_t place = places.emplace(hosts[r], places.size()).first->second;
    if (place == even.size()) even.emplace_back();
    even[place].push_back(static_cast<int>(r));
  }
  const size_t each = even.front().size();
  if (std::all_of(even.begin(), even.end(),
                  [each](const auto& ranks) { return ranks.size() == each; }))
    return even;
  even.assign(1, std::vector<int>(hosts.size()));
  std::iota(even[0].begin(), even[0].end(), 0);
  return even;
}

}  // namespace

Dissemination MakeDissemination(int rank, const std::vector<int>& hosts) {
  const auto even = EvenHosts(hosts);
  const int count = static_cast<int>(even.size());
  const int each = static_cast<int>(even.front().size());
  int host = 0, place = 0;
  for (int h = 0; h < count; ++h)
    for (int p = 0; p < each; ++p)
      if (even[h][p] == rank) host = h, place = p;
  const auto at = [&](int h, int p) {
    return even[(host + h + count) % count][(place + p + each) % each];
  };
  Dissemination found;
  for (int reach = 1; reach < each; reach *= 2)
    found.steps.push_back({at(0, -reach), at(0, reach), std::min(reach, each - reach)});
  for (int reach = 1; reach < count; reach *= 2)
    found.steps.push_back(
        {at(-reach, 0), at(reach, 0), each * std::min(reach, count - reach)});
  for (int h = 0; h < count; ++h)
    for (int p = 0; p < each; ++p) found.order.push_back(at(h, p));
  return found;
}

}  // namespace ringjax
