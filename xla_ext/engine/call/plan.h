// A plan: a schedule plus what may overlap. Compiled once per problem and cached.
//
// The meaning of a schedule is sequential; the plan lists, for each step, the earlier
// steps of this rank whose memory it touches. Where a step's range lies inside the
// earlier one's, it may follow it prefix by prefix (cut-through): that is what
// pipelines a ring and a broadcast tree without any word about segments in the
// schedule.
#pragma once

#include <cstdint>
#include <vector>

#include "collective/schedule.h"

namespace ringjax {

struct Dependency {
  int step;        // must be ahead of the dependent step
  bool contained;  // true: allowed = done(step) - shift; false: all of it first
  uint64_t shift;  // elements
};

struct PlannedStep {
  Step step;
  uint64_t count;  // elements this step moves
  std::vector<Dependency> after;
};

struct Plan {
  std::vector<PlannedStep> steps;
  std::vector<std::vector<int>> sends, receives;  // by peer, in program order
  std::vector<int> copies;
  std::vector<int> peers;  // those with sends or receives
  uint64_t scratch = 0;    // elements
  uint64_t sent = 0;       // elements this rank sends
  // Whether a message may wait with its sender until the peer can take it. The verifier
  // proves that of the table's schedules: it has no buffers either.
  bool lends = true;

  // All that this rank does is to send to one peer.
  bool OnlySends() const {
    return peers.size() == 1 && receives[static_cast<size_t>(peers[0])].empty();
  }
};

// `in_place`: kIn and kOut are one memory.
Plan Compile(const Schedule& schedule, int size, bool in_place);

}  // namespace ringjax
