// The executor: runs one plan over links, and overlaps steps that do not conflict.
//
// It moves bytes and calls base/reduce.h, and depends on no algorithm and no transport.
// It runs on the thread that makes the call, which may be a thread of XLA.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "base/reduce.h"
#include "base/status.h"
#include "engine/call/frame.h"
#include "engine/call/plan.h"
#include "engine/call/spans.h"
#include "engine/call/waiter.h"
#include "transport/shared_segment.h"

namespace ringjax {

// All links of a communicator, its shared segment if it has one, and its timeouts, as
// one call uses them.
struct Endpoints {
  std::vector<std::unique_ptr<Link>> links;  // link to each rank; null for this rank
  std::unique_ptr<SharedSegment> segment;    // null if the communicator has none
  int rank = 0;
  double timeout = 0;  // seconds without any progress; 0 means to wait forever
  double look = 1;     // seconds without progress until on_stall is called
  // Called after each wait once nothing has moved for `look` seconds, with the seconds
  // without progress and the peers that the call waits for. `*end` is true on entry
  // after `timeout`. The call ends on an error, or if `*end` is true on return.
  std::function<Status(double, const std::vector<int>&, bool* end)> on_stall;
};

inline constexpr char kNotMoved[] = "has not moved any data";

// Calls on_stall if there was no progress for long. To be called after each wait. If
// the call must end (see on_stall), fails with kDeadlineExceeded, `what` and the first
// of `peers()`, the ranks that the call waits for.
template <typename Peers>
Status CheckStall(const Endpoints& endpoints, const Waiter& waiter, Peers&& peers,
                  const char* what) {
  const double idle = waiter.IdleSeconds();
  if (idle < endpoints.look) return OkStatus();
  const std::vector<int> waited = peers();
  bool end = endpoints.timeout > 0 && idle > endpoints.timeout;
  if (endpoints.on_stall) RJ_TRY(endpoints.on_stall(idle, waited, &end));
  if (end)
    return Status(Code::kDeadlineExceeded, what, waited.empty() ? -1 : waited.front());
  return OkStatus();
}

// Waits until the counter of a peer in the shared segment has reached `value`.
// kUnavailable if the counter is below `least` or above `most`, which is impossible.
// `what` completes the error about a peer that is late: "rank 2 has not ...".
inline Status AwaitCounter(SharedSegment::Counter counter, int peer, uint64_t value,
                           uint64_t least, uint64_t most, const Endpoints& endpoints,
                           Waiter* waiter, const char* what) {
  SharedSegment& segment = *endpoints.segment;
  for (uint64_t known = least;;) {
    RJ_TRY(segment.Poll(counter, peer, value, most, &known));
    if (known >= value) break;
    RJ_TRY(waiter->Idle(
        [&segment] { return std::vector<Waiter::Interest>{{&segment, true, false}}; }));
    RJ_TRY(CheckStall(endpoints, *waiter, [peer] { return std::vector{peer}; }, what));
  }
  waiter->Progressed();
  return OkStatus();
}

// The buffers of one schedule on this rank: kIn, kOut and kScratch.
struct Buffers {
  const Spans* in = nullptr;
  const Spans* out = nullptr;
  Spans scratch;
};

// Runs all steps of a plan. Errors: kUnavailable with the rank of the peer,
// kDeadlineExceeded with the first peer that the call waited for, kCancelled, kInternal
// if a peer sends another message than the plan expects.
Status Execute(const Plan& plan, const Buffers& buffers, const Arithmetic& arithmetic,
               const Frame& frame, const Endpoints& endpoints, Waiter* waiter);

}  // namespace ringjax
