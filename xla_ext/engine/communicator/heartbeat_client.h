// How a communicator uses the heartbeat, which knows the state of its peers and reaches
// them when the links are broken.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/status.h"
#include "engine/communicator/comm_state.h"
#include "engine/communicator/straggler_probe.h"
#include "engine/communicator/teardown_barrier.h"

namespace ringjax {

// The connection of a communicator to the heartbeat. Each member may be empty.
struct HeartbeatHooks {
  // Called after this rank itself has aborted the communicator, on the thread that did
  // so: the thread of a call that failed, or a caller of AbortAndNotifyPeers. Not
  // called by Abort. The heartbeat notifies the peers here.
  std::function<void(const Status&)> on_failure;
  // Returns the world ranks that have certainly not entered call `sequence`.
  std::function<std::vector<int>(uint64_t sequence)> late_ranks;
  std::weak_ptr<StragglerProbe> straggler_probe;
  std::weak_ptr<TeardownBarrier> teardown_barrier;
};

// Asks the heartbeat about the peers of one communicator, and notifies the peers
// through it. Does nothing without a heartbeat. Thread-safe. `state` must outlive the
// object.
class HeartbeatClient {
 public:
  explicit HeartbeatClient(const CommState& state) : state_(state) {}

  // Connects the communicator to a heartbeat, in place of any earlier one.
  void SetHooks(HeartbeatHooks hooks);

  // Calls HeartbeatHooks::on_failure.
  void NotifyPeers(const Status& blame) const;

  // Sends a straggler probe about the current call, which `what` describes, to at most
  // kMostAsked members: first to ranks that are known to be late, then to the members
  // `peers`, then to all others. Returns immediately.
  void ProbeCall(const std::vector<int>& peers, const std::string& what) const;
  // Sends a straggler probe to members, by world rank, about an operation of the eager
  // lane, which `what` describes. Returns immediately.
  void ProbeOperation(uint64_t operation, const std::vector<int>& world_ranks,
                      const std::string& what) const;
  // The replies to the last probe, which arrive a moment later.
  std::vector<ProbeReply> ProbeReplies(const std::vector<int>& world_ranks) const;
  // World ranks that have not made the current call, as far as this rank can find out.
  std::vector<int> Late() const;
  std::vector<int> Others() const;  // world ranks of all other members

  // The teardown barrier. Announces, after an abort, that this rank is ready to release
  // the memory that ranks share outside their links (NCCL's), and waits at most
  // `seconds` until all live members have announced the same. Returns whether all have;
  // true without a heartbeat.
  bool AwaitTeardown(double seconds) const;

 private:
  HeartbeatHooks hooks() const;  // a copy: SetHooks may replace hooks_

  const CommState& state_;
  mutable std::mutex mutex_;  // guards hooks_
  HeartbeatHooks hooks_;
};

}  // namespace ringjax
