// The abort of a communicator: whether and why the communicator has been aborted, and
// which members have shut down.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

#include "base/status.h"
#include "transport/link.h"

namespace ringjax {

class ResilientComm;

// Thread-safe. An abort is final, and the reason of the first abort is kept. The
// arguments of the constructor must outlive the object.
class AbortState {
 public:
  // Abort ends `own` (CommState::own), which stores the reason, and rings `doorbell` to
  // wake a call that sleeps.
  AbortState(const std::vector<int>& world_ranks, Doorbell* doorbell,
             ResilientComm* own)
      : world_ranks_(world_ranks), doorbell_(doorbell), own_(own) {}
  AbortState(const AbortState&) = delete;
  AbortState& operator=(const AbortState&) = delete;

  // Makes the pending call and every later call fail with `status`, whose rank is a
  // world rank. Only the first abort sets the status. Returns whether this abort is the
  // first.
  bool Abort(const Status& status);
  Status status() const;
  bool aborted() const { return aborted_.load(std::memory_order_acquire); }
  // The abort flag, for a Waiter and for the seq_cst load in CallRunner::Guarded.
  const std::atomic<bool>& flag() const { return aborted_; }
  // Waits until some thread aborts the communicator, but at most `limit`.
  void Await(std::chrono::milliseconds limit) const;

  // Records that a member has shut down cleanly after `finished` calls.
  void OnPeerShutdown(int world_rank, uint64_t finished);
  // Fails if a member has shut down without finishing call `sequence`. The rank of the
  // error is a rank of the communicator, not of the world. A call that this member has
  // finished does not fail: it can still complete on the other ranks.
  Status CheckShutdowns(uint64_t sequence) const;

 private:
  const std::vector<int>& world_ranks_;  // world rank of each rank
  Doorbell* const doorbell_;
  ResilientComm* const own_;
  std::atomic<bool> aborted_{false};
  std::atomic<bool> any_shut_down_{false};
  mutable std::mutex mutex_;           // guards all below
  std::map<int, uint64_t> shut_down_;  // finished calls by world rank
};

}  // namespace ringjax
