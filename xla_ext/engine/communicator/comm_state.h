// The options of a communicator, and the state that its parts share: its links, its
// order of calls, and its abort.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "collective/table.h"
#include "engine/call/executor.h"
#include "engine/communicator/abort_state.h"
#include "engine/communicator/progress.h"
#include "engine/recorder/recorder.h"

namespace ringjax {

class Communicator;
class ResilientComm;

// The id of the world's control communicator, on which the ranks compare the calls that
// they make on their CUDA devices (device/consistency_checker.h).
inline constexpr int kWorldControl = 1 << 30;

struct CommunicatorOptions {
  int id = 0;
  std::string name = "world";
  uint64_t job = 0;
  uint32_t epoch = 0;  // number of the epoch of the job; not epoch_index()
  Topology topology;
  std::vector<int> world_ranks;     // world rank of each rank of this communicator
  double spin_seconds = 50e-6;      // longest spin before a waiting thread sleeps
  double stall_warning = 30;        // seconds of waiting until a warning
  double collective_timeout = 300;  // seconds until a call fails; 0 disables the limit
  // Forces algorithms: "" for none, a name, or "allreduce:ring,broadcast:binomial".
  std::string algorithm;
  CostModel cost;

  std::shared_ptr<Recorder> recorder;  // receives an event for every call; may be null
  int process_set = 0;                 // number of the process set, for the recorder
  // Index of the CUDA device among those of this process. The recorder receives an
  // event for each call of device 0, but only the bytes of calls of the other devices:
  // one training step must not look like as many as the process has devices.
  int device_index = 0;
  // The communicator belongs to an eager lane. The lane records its operations itself,
  // so the communicator records no calls.
  bool eager = false;
  // For a replica set of a resilient job: the communicator of all replica sets, which
  // make the same calls. Every call ends with a barrier on it, so that a call that
  // fails in one set fails in all of them. Therefore the data in the shared segment of
  // one set are never enough to complete a call. The communicator of all sets is static
  // and serves no other calls.
  std::shared_ptr<Communicator> end_barrier;
};

// The parts of a communicator use this state directly. Only the thread that serves a
// call uses `endpoints`; the other members are constant, or thread-safe themselves.
struct CommState {
  // With a null `resilient`, the communicator is static.
  CommState(CommunicatorOptions options, std::vector<std::unique_ptr<Link>> links,
            std::unique_ptr<Doorbell> doorbell, std::unique_ptr<SharedSegment> segment,
            std::shared_ptr<ResilientComm> resilient);

  int id() const { return options.id; }
  int rank() const { return options.topology.rank; }
  int size() const { return options.topology.size; }
  int world_rank() const { return options.world_ranks[rank()]; }
  // "RINGJAX[world, epoch 0]: ", the start of every error text that leaves the core.
  std::string Prefix() const;
  // Sequence number of the call that was begun last. Relaxed: another thread may read
  // an earlier number.
  uint64_t sequence() const { return progress->sequence(); }
  // A waiter for one call of this communicator.
  Waiter NewWaiter() const {
    return Waiter(doorbell.get(), &abort.flag(), options.spin_seconds, oversubscribed);
  }

  // After construction only `cost` and `algorithm` change, in SetCostModel, which holds
  // the ticket lock.
  CommunicatorOptions options;
  const std::unique_ptr<Doorbell> doorbell;
  // The order of the calls that run in this epoch only: those of an eager lane, those
  // of a device, and all calls before the installation. It has this one epoch, and ends
  // with the abort of the communicator.
  const std::shared_ptr<ResilientComm> own;
  // The ResilientComm whose epoch this communicator is; `own` in a static job.
  const std::shared_ptr<ResilientComm> resilient;
  const bool repairs;  // see ResilientComm::repairs
  const std::shared_ptr<Progress> progress;
  Endpoints endpoints;
  bool oversubscribed = false;  // this host has more ranks than CPUs
  AbortState abort;
  std::atomic<uint64_t> finished{0};  // sequence number of the call finished last
};

}  // namespace ringjax
