// Implements MakeDissemination. See dissemination.h.
#include "engine/call/dissemination.h"

#include <algorithm>

#include "collective/algorithms.h"

namespace ringjax {

Dissemination MakeDissemination(const Topology& topology) {
  std::vector<std::vector<int>> even = {collective::World(topology).ranks};
  if (collective::HasEvenHierarchy(topology)) even = collective::Hosts(topology);
  const int count = static_cast<int>(even.size());
  const int each = static_cast<int>(even.front().size());
  int host = 0, place = 0;
  for (int h = 0; h < count; ++h)
    for (int p = 0; p < each; ++p)
      if (even[h][p] == topology.rank) host = h, place = p;
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
