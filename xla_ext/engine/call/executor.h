// The executor: runs the steps of one plan over links. Steps without conflicts overlap.
//
// The executor moves bytes and calls base/reduce.h. It depends on no algorithm and no
// transport, and runs on the thread that makes the call, which may be a thread of XLA.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "base/reduce.h"
#include "base/status.h"
#include "engine/call/dissemination.h"
#include "engine/call/frame.h"
#include "engine/call/plan.h"
#include "engine/call/spans.h"
#include "engine/call/waiter.h"
#include "transport/shared_segment.h"

namespace ringjax {

struct HostEndpoints;

// The links, the shared segments and the timeouts of a communicator, as one call uses
// them.
struct Endpoints {
  // The link to each rank; null for this rank, and for a rank to which no link has been
  // needed yet.
  std::vector<std::unique_ptr<Link>> links;
  // Makes the links to these ranks that do not exist. Each of these ranks must require
  // the link to this rank in the same call. Null if all links exist.
  std::function<Status(std::span<const int> peers)> require;
  // A segment of all ranks; null if the communicator has none.
  std::unique_ptr<SharedSegment> segment;
  // The segment of this host, if there are several hosts; null if it has none.
  std::unique_ptr<HostEndpoints> host;
  Dissemination dissemination;  // the steps of an agreement over links
  int rank = 0;
  double timeout = 0;      // seconds without progress until a call fails; 0 means never
  double stall_after = 1;  // seconds without progress until on_stall is called
  // A function that is called after each wait if no data have moved for `stall_after`
  // seconds. It receives the seconds without progress, the peers that the call waits
  // for, and in `*end` whether `timeout` has passed. The call ends if the function
  // fails, or if it returns with `*end` true.
  std::function<Status(double, const std::vector<int>&, bool* end)> on_stall;
};

// The ranks of this host in a communicator of several hosts. They share a segment, in
// which a rank is known by its index in `ranks`.
struct HostEndpoints {
  std::vector<int> ranks;           // ranks of the communicator, in ascending order
  std::unique_ptr<Endpoints> near;  // the segment, without links
  // Returns whether a tile has a cache line for each of these ranks.
  bool fits() const { return near->segment->tile_bytes() / kLineBytes >= ranks.size(); }
};

inline constexpr char kNotMoved[] = "has not moved any data";

// Calls on_stall if there has been no progress for `endpoints.stall_after` seconds.
// Must be called after each wait. `peers()` returns the ranks that the call waits for.
// If the call must end (see on_stall), fails with kDeadlineExceeded, the text `what`
// and the first rank of peers().
template <typename Peers>
Status CheckStall(const Endpoints& endpoints, const Waiter& waiter, Peers&& peers,
                  const char* what) {
  const double idle = waiter.IdleSeconds();
  if (idle < endpoints.stall_after) return OkStatus();
  const std::vector<int> waited = peers();
  bool end = endpoints.timeout > 0 && idle > endpoints.timeout;
  if (endpoints.on_stall) RJ_TRY(endpoints.on_stall(idle, waited, &end));
  if (end)
    return Status(Code::kDeadlineExceeded, what, waited.empty() ? -1 : waited.front());
  return OkStatus();
}

// Waits until the counter of a peer in the shared segment has reached `value`. Fails
// with kUnavailable if the counter is below `least` or above `most`, which means that
// the segment is damaged. `wakes` wakes this rank when the counter may have advanced.
// `what` is a predicate for the error about a late peer: "has not ...".
inline Status AwaitCounter(SharedSegment::Counter counter, int peer, uint64_t value,
                           uint64_t least, uint64_t most, Waitable* wakes,
                           const Endpoints& endpoints, Waiter* waiter,
                           const char* what) {
  const SharedSegment& segment = *endpoints.segment;
  for (uint64_t known = least;;) {
    RJ_TRY(segment.Poll(counter, peer, value, most, &known));
    if (known >= value) break;
    RJ_TRY(waiter->Idle(
        [wakes] { return std::vector<Waiter::Interest>{{wakes, true, false}}; }));
    RJ_TRY(CheckStall(endpoints, *waiter, [peer] { return std::vector{peer}; }, what));
  }
  waiter->Progressed();
  return OkStatus();
}

// The memory of this rank to which a schedule refers as kIn, kOut and kScratch.
struct Buffers {
  const Spans* in = nullptr;
  const Spans* out = nullptr;
  Spans scratch;
};

// Runs all steps of a plan. Fails with kUnavailable and the rank of a lost peer, with
// kDeadlineExceeded and the first peer that the call waited for, with kCancelled after
// an interrupt, or with kInternal if a peer sends a message that the plan does not
// expect.
Status Execute(const Plan& plan, const Buffers& buffers, const Arithmetic& arithmetic,
               const Frame& frame, const Endpoints& endpoints, Waiter* waiter);

}  // namespace ringjax
