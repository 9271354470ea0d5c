// LaneState: the communicator, options, statistics and mutex that the members of one
// EagerLane (lane.h) share by reference.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "base/status.h"
#include "engine/communicator/communicator.h"
#include "engine/communicator/resilient_comm.h"
#include "engine/eager/backend.h"

namespace ringjax {

struct EagerOptions {
  uint64_t fusion_threshold = uint64_t{128} << 20;  // bytes; equal on all ranks
  size_t cache_capacity = 65536;                    // entries; equal on all ranks
  double cycle_seconds = 0;   // seconds to wait for more submissions to fuse
  double stall_warning = 30;  // seconds of waiting until a warning; 0 means never
  double timeout = 300;       // seconds of waiting until an error; 0 means never
};

// A number that any thread may read while one thread at a time changes it.
class Count {
 public:
  Count() = default;
  Count(const Count& other) { *this = other; }
  Count& operator=(const Count& other) { return *this = uint64_t{other}; }
  Count& operator=(uint64_t n) {
    n_.store(n, std::memory_order_relaxed);
    return *this;
  }
  operator uint64_t() const {  // NOLINT: implicit by design
    return n_.load(std::memory_order_relaxed);
  }
  Count& operator+=(uint64_t n) { return *this = *this + n; }
  Count& operator++() { return *this += 1; }

 private:
  std::atomic<uint64_t> n_{0};
};

struct EagerStats {
  // The holder of the progress lock writes these counts.
  Count rounds;
  Count message_bytes;  // bytes of the messages that this rank has sent
  Count cached;         // submissions that were sent as a cache index
  Count calls;
  Count fused;        // submissions in these calls
  Count piggybacked;  // calls completed from data that arrived with the round
  // A thread that holds LaneState::mutex writes these counts.
  Count submissions;
  Count failures;
  Count driven;  // submissions whose callers did the work of the lane
};

// Prepends the prefix of a communicator and `what`, the title of an operation, to an
// error.
inline Status WithContext(const std::string& prefix, const std::string& what,
                          const Status& cause) {
  return Status(cause.code(), prefix + what + ": " + cause.message(), cause.rank());
}

// Shared by the members of an EagerLane. In their comments, "the holder" is the thread
// that holds the progress lock (progress_lock.h).
struct LaneState {
  LaneState(std::shared_ptr<Communicator> present, const EagerOptions& lane_options)
      : resilient(present->resilient()),
        options(lane_options),
        communicator(std::move(present)) {}

  // Prepends the prefix of the communicator and `what` to an error. The caller holds
  // the progress lock or `mutex`.
  Status WithContext(const std::string& what, const Status& cause) const {
    return ringjax::WithContext(communicator->Prefix(), what, cause);
  }

  const std::shared_ptr<ResilientComm> resilient;  // shared by all epochs of the lane
  const EagerOptions options;

  // Guards the following members, and members of other classes whose comments name it.
  // One mutex guards them all because a task belongs to an epoch: no task may be added
  // while ProgressEngine::MoveToNextEpoch replaces the communicator and collects the
  // tasks of the ended epoch.
  mutable std::mutex mutex;
  // Only the holder of the progress lock writes the next two members, with `mutex`
  // held, so the holder may read both without `mutex`. (EagerLane::set_cuda writes
  // `cuda`, but before any submission.)
  std::shared_ptr<Communicator> communicator;  // the lane's current epoch
  std::shared_ptr<EagerBackend> cuda;          // null if there is none
  EagerBackendMaker make_cuda;
  EagerStats stats;  // any thread may read it without `mutex`
};

}  // namespace ringjax
