// Route: how the data of a request travel. A request is a group of tensors of one call
// that move together. The possible routes:
//
//   kInline    in the shared segment, together with the agreement (inline_data.h)
//   kTiles     through the shared segment, in tiles (tiles.h)
//   kRails     inside the hosts in tiles, and between them over links (rails.h)
//   kAdasum    between pairs of ranks, over links (adasum.h)
//   kSchedule  over links, by the schedule of an algorithm (executor.h). A message to a
//              rank of the same host is read by CMA from `least_cma` bytes on; else the
//              message goes through the ring buffer of the link. A message to another
//              host goes through TCP.
//
// xla_ext/README.md has the table of sizes. All ranks must choose the same route, so
// the decision depends only on values that are equal on all ranks. If an alltoall is
// not even (Problem::even), only the number of ranks is equal on all ranks, because no
// rank knows how many bytes the other ranks send.
#pragma once

#include <atomic>
#include <cstdint>
#include <string_view>

#include "base/reduce.h"
#include "base/status.h"
#include "collective/schedule.h"
#include "collective/table.h"

namespace ringjax {

// The size in bytes of the longest inline allreduce. Each rank reduces all elements,
// which up to this length takes less time than a second exchange. For the other
// collectives the size of an inline slot is the limit, at most 65 KiB
// (transport/shared_segment.cc).
inline constexpr uint64_t kMaxInlineAllreduce = 16 << 10;

// The size in bytes from which messages are read by CMA. For a shorter message, the
// system call costs more than two copies. Only tests change this value.
inline std::atomic<uint64_t> least_cma{16 << 10};

struct Route {
  enum class Kind : uint8_t { kInline, kTiles, kAdasum, kRails, kSchedule };
  Kind kind = Kind::kSchedule;
  const Algorithm* algorithm = nullptr;  // kTiles, kRails and kSchedule

  // Returns "inline", "tiles", "adasum" or the name of the algorithm.
  std::string_view name() const;
};

// The inputs of RouteOf that are equal for all requests of one collective.
struct RouteInputs {
  const Topology& topology;
  const CostModel& cost;
  std::string_view algorithm = {};  // name of the forced algorithm; empty if none is
  uint64_t inline_bytes = 0;        // size of an inline slot; 0 disables inline data
  bool repairs = false;  // whether another epoch may follow (resilient_comm.h)
};

// Returns whether the route is kInline. Faster than RouteOf, because it does not
// evaluate the cost model.
bool IsInline(const Problem& problem, const Arithmetic& arithmetic,
              const RouteInputs& inputs);

// Chooses the route of a request. Fails with kInvalidArgument if the forced algorithm
// does not exist or does not apply.
Result<Route> RouteOf(const Problem& problem, const Arithmetic& arithmetic,
                      const RouteInputs& inputs);

}  // namespace ringjax
