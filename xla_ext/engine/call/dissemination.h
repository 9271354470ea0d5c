// Dissemination: the messages by which all ranks learn what every rank says, in about
// log2 P steps (Hensgen, Finkel, Manber, 1988; Bruck et al., 1997).
//
// If all hosts have equally many ranks, the first steps are among the ranks of a host,
// and the others among the ranks with the same place on their hosts. So only log2 H
// steps of H hosts wait for the network. In a single level, neighboring ranks of two
// hosts would exchange messages in every step.
#pragma once

#include <vector>

#include "collective/schedule.h"

namespace ringjax {

struct Dissemination {
  // This rank sends what the first `ranks` ranks of its order say to rank `to`, and
  // receives what the next `ranks` ranks of its order say from rank `from`.
  struct Step {
    int to, from, ranks;
  };
  std::vector<Step> steps;
  // All ranks in the order in which this rank learns what they say, itself first.
  std::vector<int> order;
};

// Returns the steps of the rank topology.rank.
Dissemination MakeDissemination(const Topology& topology);

}  // namespace ringjax
