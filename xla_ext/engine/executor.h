// The executor: runs one plan over links, overlapping whatever does not conflict.
//
// It moves bytes and calls base/reduce.h; it knows no algorithm and no transport. It
// runs on the thread that calls it (the XLA worker for in-place calls: no hand-over).
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "base/reduce.h"
#include "base/status.h"
#include "engine/frame.h"
#include "engine/plan.h"
#include "engine/spans.h"
#include "engine/waiter.h"
#include "transport/board.h"

namespace ringjax {

// What the threads of one communicator share while a collective runs.
struct Lane {
  std::vector<std::unique_ptr<Link>> links;  // by rank; null for this rank
  std::unique_ptr<Board> board;              // null unless all ranks share a host
  int rank = 0;
  double timeout = 0;  // seconds without any progress; 0: wait forever
  // Asked whenever the thread wakes and nothing has moved for a second, with the
  // seconds so far and the peers waited for; not ok ends the call.
  std::function<Status(double, const std::vector<int>&)> on_stall;
};

struct Memory {
  const Spans* in = nullptr;
  const Spans* out = nullptr;
  Spans scratch;
};

// Errors: kUnavailable with the peer's rank, kDeadlineExceeded with the first peer that
// was waited for, kCancelled, kInternal for a stream that is out of step.
Status Execute(const Plan& plan, const Memory& memory, const Arithmetic& arithmetic,
               const Frame& frame, const Lane& lane, Waiter* waiter);

}  // namespace ringjax
