// The route of a request, which is a group of tensors of a call that move together.
// Only this file decides about routes:
//
//   kInline    in the shared segment, together with the agreement (inline_data.h)
//   kTiles     through the shared segment, in tiles (tiles.h)
//   kAdasum    between pairs of ranks, over links (adasum.h)
//   kSchedule  over links, by the schedule of an algorithm (executor.h). A message to a
//              rank of the same host is read by CMA from `least_cma` bytes on; else the
//              message goes through the ring buffer of the link. A message to another
//              host goes through TCP.
//
// xla_ext/README.md has the table of sizes. All ranks must choose the same route, so
// the decision depends only on values that are equal on all ranks. For an alltoall,
// only the number of ranks is such a value, because no rank knows how many bytes the
// others send.
#pragma once

#include <atomic>
#include <cstdint>
#include <string_view>

#include "base/reduce.h"
#include "base/status.h"
#include "collective/schedule.h"
#include "collective/table.h"

namespace ringjax {

// Bytes of the longest inline allreduce. Each rank reduces all elements, which up to
// this length takes less time than a second exchange. For the other collectives the
// size of an inline slot is the limit, at most 65 KiB (transport/shared_segment.cc).
inline constexpr uint64_t kMaxInlineAllreduce = 16 << 10;

// Bytes of the shortest message that is read by CMA. A system call costs more than two
// copies of a shorter message. Only tests change the number.
inline std::atomic<uint64_t> least_cma{16 << 10};

struct Route {
  enum class Kind : uint8_t { kInline, kTiles, kAdasum, kSchedule };
  Kind kind = Kind::kSchedule;
  const Algorithm* algorithm = nullptr;  // kTiles and kSchedule

  // Returns "inline", "tiles", "adasum" or the name of the algorithm.
  std::string_view name() const;
};

// The inputs of the decision that are equal for all requests of one collective.
struct RouteInputs {
  const Topology& topology;
  const CostModel& cost;
  std::string_view algorithm = {};  // name of the forced algorithm; empty if none is
  uint64_t inline_bytes = 0;        // size of an inline slot; 0 disables inline data
  bool repairs = false;  // whether another epoch may follow (resilient_comm.h)
};

// Returns whether the route is kInline. Faster than RouteOf, because the cost model is
// not evaluated.
bool IsInline(const Problem& problem, const Arithmetic& arithmetic,
              const RouteInputs& inputs);

// Decides the route. Fails with kInvalidArgument if the forced algorithm does not exist
// or does not apply.
Result<Route> RouteOf(const Problem& problem, const Arithmetic& arithmetic,
                      const RouteInputs& inputs);

}  // namespace ringjax
