// An allreduce on several even hosts, through the segments of the hosts.
//
// It is the hierarchical algorithm (collective/hierarchical.cc) in three phases:
//
//   inside     each rank reduces one part of the vector for its host, in tiles
//   between    the rail of that part, one rank of each host, reduces it by messages
//   inside     each rank reads the parts of its neighbours, in tiles
//
// A message inside a host would wake its receiver, and every rank of a host has one for
// every other. In tiles a rank waits twice in a phase, however many ranks the host has.
// In return no phase overlaps the next, so a long vector is better reduced by the
// hierarchical schedule, which works inside the hosts while the network is busy.
#pragma once

#include "engine/call/executor.h"

namespace ringjax {

// Runs the three phases. `between`: the plan of this rank's steps with other hosts,
// which reduce in kOut. Every rank must have endpoints.host. Fails with the errors of
// Execute.
Status ReduceOnRails(const Plan& between, const Problem& problem,
                     const Buffers& buffers, const Arithmetic& arithmetic,
                     const Frame& frame, const Endpoints& endpoints, Waiter* waiter);

}  // namespace ringjax
