// LaneState: the state that the parts of one EagerLane share (lane.h). Each part has a
// reference to it.
#pragma once

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
  double cycle_seconds = 0;                         // seconds to wait for more to fuse
  // Seconds of waiting for other ranks until a warning and until an error. 0
  // means never.
  double stall_warning = 30;
  double timeout = 300;
};

struct EagerStats {
  // `message_bytes` counts the bytes of all messages that this rank has sent.
  uint64_t rounds = 0, message_bytes = 0;
  uint64_t submissions = 0, cached = 0;         // cached: sent as a number
  uint64_t calls = 0, fused = 0, failures = 0;  // fused: submissions in the calls
  // driven: submissions whose callers did the work of the lane while they waited.
  // piggybacked: calls that were left out, because their data came with the round.
  uint64_t driven = 0, piggybacked = 0;
};

// Adds the prefix of a communicator and `what` to an error.
inline Status Shown(const std::string& prefix, const std::string& what,
                    const Status& cause) {
  return Status(cause.code(), prefix + what + ": " + cause.message(), cause.rank());
}

// In the comments of the lane and its parts, "the holder" is the thread that has the
// progress lock (progress_lock.h).
struct LaneState {
  LaneState(std::shared_ptr<Communicator> present, const EagerOptions& lane_options)
      : resilient(present->resilient()),
        options(lane_options),
        communicator(std::move(present)) {}

  // Adds the prefix and `what` to an error. With the progress lock or `mutex` held.
  Status Named(const std::string& what, const Status& cause) const {
    return Shown(communicator->Prefix(), what, cause);
  }

  const std::shared_ptr<ResilientComm> resilient;  // shared by all epochs of the lane
  const EagerOptions options;

  // Guards the rest of this struct, and those members of the parts whose comments say
  // so. The parts share one mutex, because a task belongs to an epoch: no task may be
  // added while ProgressEngine::Inherit collects the tasks of an epoch and replaces its
  // communicator.
  mutable std::mutex mutex;
  // Written by the holder with `mutex` held (EagerLane::set_cuda writes before any
  // submission), so the holder may read them without `mutex`.
  std::shared_ptr<Communicator> communicator;  // the lane's current epoch
  std::shared_ptr<EagerBackend> cuda;          // null: there is none
  EagerBackendMaker make_cuda;
  EagerStats stats;
};

}  // namespace ringjax
