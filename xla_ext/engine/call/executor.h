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
#include "engine/call/frame.h"
#include "engine/call/plan.h"
#include "engine/call/spans.h"
#include "engine/call/waiter.h"
#include "transport/board.h"

namespace ringjax {

// What the threads of one communicator share while a collective runs.
struct Lane {
  std::vector<std::unique_ptr<Link>> links;  // by rank; null for this rank
  std::unique_ptr<Board> board;              // null unless all ranks share a host
  int rank = 0;
  double timeout = 0;  // seconds without any progress; 0: wait forever
  double look = 1;     // seconds without progress until anybody is asked
  // Asked whenever the thread wakes and nothing has moved for `look`, with the seconds
  // so far and the peers waited for. Not ok ends the call; `*end`: whether the time is
  // up, which is the timeout if nobody is asked.
  std::function<Status(double, const std::vector<int>&, bool* end)> on_stall;
};

inline constexpr char kNotMoved[] = "has not moved any data";

// After each turn of waiting: once nothing has moved for a while, asks `on_stall`, and
// at the end of the time blames the first of `peers()`, the ranks that are waited for,
// for what it has not done.
template <typename Peers>
Status CheckStall(const Lane& lane, const Waiter& waiter, Peers&& peers,
                  const char* what) {
  const double idle = waiter.IdleSeconds();
  if (idle < lane.look) return OkStatus();
  const std::vector<int> waited = peers();
  bool end = lane.timeout > 0 && idle > lane.timeout;
  if (lane.on_stall) RJ_TRY(lane.on_stall(idle, waited, &end));
  if (end)
    return Status(Code::kDeadlineExceeded, what, waited.empty() ? -1 : waited.front());
  return OkStatus();
}

// Waits until a peer's counter on the board is `value`; it cannot be beyond `most`, nor
// before `least`. `what`: what a peer that does not get there is blamed for.
inline Status AwaitCounter(Board::Counter counter, int peer, uint64_t value,
                           uint64_t least, uint64_t most, const Lane& lane,
                           Waiter* waiter, const char* what) {
  Board& board = *lane.board;
  for (uint64_t known = least;;) {
    RJ_TRY(board.Follow(counter, peer, value, most, &known));
    if (known >= value) break;
    RJ_TRY(waiter->Idle(
        [&board] { return std::vector<Waiter::Interest>{{&board, true, false}}; }));
    RJ_TRY(CheckStall(lane, *waiter, [peer] { return std::vector{peer}; }, what));
  }
  waiter->Progressed();
  return OkStatus();
}

struct Memory {
  const Spans* in = nullptr;
  const Spans* out = nullptr;
  Spans scratch;
};

// From so many bytes on, a message to a rank of this host is lent (transport/loans.h).
// Only tests change it.
inline std::atomic<uint64_t> least_loan{16 << 10};

// Errors: kUnavailable with the peer's rank, kDeadlineExceeded with the first peer that
// was waited for, kCancelled, kInternal for a stream that is out of step.
Status Execute(const Plan& plan, const Memory& memory, const Arithmetic& arithmetic,
               const Frame& frame, const Lane& lane, Waiter* waiter);

}  // namespace ringjax
