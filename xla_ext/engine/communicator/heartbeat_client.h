// HeartbeatClient: gives a communicator access to the heartbeat, which knows the state
// of all peers and reaches peers even if links are broken.
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

namespace ringjax {

// A barrier that ranks pass before they free memory that NCCL shares between ranks.
//
// A rank that aborts NCCL frees memory that kernels of other ranks of the host may
// still use. So each rank first announces that it is ready to abort, and waits, for a
// limited time, until the other live ranks have announced that they are ready. The
// heartbeat carries the announcements, because the links of the communicator may be
// broken by then. Thread-safe.
class TeardownBarrier {
 public:
  virtual ~TeardownBarrier() = default;
  // Announces to all peers that this rank is ready to tear down the communicator with
  // this id and epoch.
  virtual void AnnounceTeardown(int communicator, uint32_t epoch) = 0;
  // Returns those of the world ranks `ranks` that are alive and have not announced that
  // they are ready. Returns none once the heartbeat has stopped.
  virtual std::vector<int> NotReady(int communicator, uint32_t epoch,
                                    const std::vector<int>& ranks) const = 0;
};

// The functions and objects of the heartbeat that a communicator uses. Each member may
// be empty.
struct HeartbeatHooks {
  // Notifies the peers. Called after this rank itself has aborted the communicator, on
  // the thread that aborted it: the thread of a call that failed, or a caller of
  // AbortAndNotifyPeers. Communicator::Abort does not call `on_failure`.
  std::function<void(const Status&)> on_failure;
  // Returns the world ranks that have not reported that they entered call `sequence`.
  std::function<std::vector<int>(uint64_t sequence)> late_ranks;
  std::weak_ptr<StragglerProbe> straggler_probe;
  std::weak_ptr<TeardownBarrier> teardown_barrier;
};

// Queries the heartbeat about the peers of one communicator, and notifies the peers
// through the heartbeat. Without a heartbeat, all functions do nothing. Thread-safe.
// `state` must outlive the object.
class HeartbeatClient {
 public:
  explicit HeartbeatClient(const CommState& state) : state_(state) {}

  const Doorbell& doorbell() const { return *state_.doorbell; }

  // Connects the communicator to a heartbeat, in place of any earlier one.
  void SetHooks(HeartbeatHooks hooks);

  // Announces to all members, if they share a segment, that this rank shuts down
  // cleanly. The heartbeat announces the same to its neighbours only.
  void AnnounceShutdown() const;

  // Calls HeartbeatHooks::on_failure.
  void NotifyPeers(const Status& blame) const;

  // Sends a straggler probe about the current call, which `what` describes, to at most
  // kMaxProbed members: ranks that are known to be late come first, then the members
  // `peers`, then all others. Returns immediately.
  void ProbeCall(const std::vector<int>& peers, const std::string& what) const;
  // Sends a straggler probe about an operation of the eager lane, which `what`
  // describes, to the members `world_ranks`. Returns immediately.
  void ProbeOperation(uint64_t operation, const std::vector<int>& world_ranks,
                      const std::string& what) const;
  // Returns the replies to the last probe that have arrived so far.
  std::vector<ProbeReply> ProbeReplies(const std::vector<int>& world_ranks) const;
  // Returns the world ranks that, as far as this rank knows, have not made the current
  // call.
  std::vector<int> Late() const;
  std::vector<int> Others() const;  // world ranks of all other members

  // Waits at the TeardownBarrier for at most `seconds`, after an abort. Returns true if
  // all live members are ready to tear down, or if there is no heartbeat.
  bool AwaitTeardown(double seconds) const;

 private:
  HeartbeatHooks hooks() const;  // a copy: SetHooks may replace hooks_

  const CommState& state_;
  mutable std::mutex mutex_;  // guards hooks_
  HeartbeatHooks hooks_;
};

}  // namespace ringjax
