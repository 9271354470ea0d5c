// A plan: a schedule and, for each step, the earlier steps that it must wait for. The
// communicator makes it once per problem and caches it.
//
// A schedule is defined as sequential. The plan lists, for each step, the earlier steps
// of this rank that touch the same memory, if one of the two writes to it. If the
// memory of a step lies inside that of an earlier step, the step may follow the earlier
// one prefix by prefix (cut-through). This pipelines a ring and a broadcast tree
// although their schedules do not mention segments.
#pragma once

#include <cstdint>
#include <vector>

#include "collective/schedule.h"

namespace ringjax {

// A dependency of one step on an earlier step. While the earlier step is incomplete,
// the dependent step may move as many elements as the earlier step has moved, minus
// `shift`. If not `contained`, the dependent step may not move any element.
struct Dependency {
  int step;        // index of the earlier step
  bool contained;  // the memory of the dependent step lies inside that of `step`
  uint64_t shift;  // offset, in elements, at which it begins there
};

struct PlannedStep {
  Step step;
  uint64_t count;  // elements that the step moves
  std::vector<Dependency> after;
};

struct Plan {
  std::vector<PlannedStep> steps;
  // Indices into `steps`, in the order of the schedule; sends and receives by peer.
  std::vector<std::vector<int>> sends, receives;
  std::vector<int> copies;
  std::vector<int> peers;  // ranks that this rank sends to or receives from
  uint64_t scratch = 0;    // size of the scratch memory, in elements
  uint64_t sent = 0;       // elements that this rank sends
  // Whether messages may be read by CMA. A send by CMA ends only when the peer has read
  // the message. Even so the schedules of the table cannot deadlock: the verifier
  // proves it for links without buffers.
  bool uses_cma = true;

  // Whether this rank sends to one peer only and receives nothing.
  bool OnlySends() const {
    return peers.size() == 1 && receives[static_cast<size_t>(peers[0])].empty();
  }
};

// Makes the plan of one rank's schedule in a communicator of `size` ranks. `in_place`:
// whether kIn and kOut may be the same memory.
Plan Compile(const Schedule& schedule, int size, bool in_place);

}  // namespace ringjax
