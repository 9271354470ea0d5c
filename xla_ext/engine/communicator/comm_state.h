// The options of a communicator, and what the classes that compose it share: links, the
// order of calls, and the abort.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "collective/table.h"
#include "engine/call/executor.h"
#include "engine/communicator/progress.h"
#include "engine/recorder/recorder.h"
#include "transport/link.h"

namespace ringjax {

class Communicator;
class ResilientComm;

// The id of the world's control communicator, on which the ranks compare the calls that
// they make on their CUDA devices (device/consistency_checker.h).
inline constexpr int kWorldControl = 1 << 30;

// Makes links to ranks of a communicator, and stores them in `links`. Runs on the
// thread of the call that needs them, and gives up once `stopped` returns true. The
// rank of an error is a rank of the communicator.
using LinkOpener = std::function<Status(std::span<const int> peers,
                                        const std::function<bool()>& stopped,
                                        std::vector<std::unique_ptr<Link>>* links)>;

struct CommunicatorOptions {
  int id = 0;
  std::string name = "world";
  uint64_t job = 0;
  uint32_t epoch = 0;  // index of the epoch in the job; not epoch_index()
  Topology topology;
  std::vector<int> world_ranks;     // world rank of each rank of this communicator
  double spin_seconds = 50e-6;      // longest spin before a waiting thread sleeps
  double stall_warning = 30;        // seconds of waiting until a warning
  double collective_timeout = 300;  // seconds until a call fails; 0 disables the limit
  // Forced algorithms: "" for none, a name that applies to allreduce, or a list such as
  // "allreduce:ring,broadcast:binomial".
  std::string algorithm;
  CostModel cost;
  LinkOpener open_links;     // null if all links exist
  int doorbell_socket = -1;  // the socket that wakes this rank; -1 if it never polls

  std::shared_ptr<Recorder> recorder;  // receives an event for every call; may be null
  int process_set = 0;                 // id of the process set, for the recorder
  // Index of the CUDA device among the devices of this process. The recorder receives
  // an event for each call of device 0, but only the bytes of calls of the other
  // devices, because all devices make the same calls and one training step must not be
  // recorded several times.
  int device_index = 0;
  // Whether the communicator belongs to an eager lane. The lane records its operations
  // itself, so the communicator records no calls.
  bool eager = false;
  // For a replica set of an elastic job, the communicator of the ranks of all replica
  // sets, which all make the same calls. Every call ends with a barrier on
  // `end_barrier`, so that a call that fails in one set fails in all sets. Therefore a
  // rank never completes a call from the shared segment of its set alone. `end_barrier`
  // is static and serves no other calls.
  std::shared_ptr<Communicator> end_barrier;
};

// Whether and why a communicator has been aborted, and which members have shut down.
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
  // Returns the abort flag, for a Waiter and for the seq_cst load in
  // CallRunner::Guarded.
  const std::atomic<bool>& flag() const { return aborted_; }
  // Waits until some thread aborts the communicator, but at most `limit`.
  void Await(std::chrono::milliseconds limit) const;

  // Records that a member has shut down cleanly after `finished` calls.
  void OnPeerShutdown(int world_rank, uint64_t finished);
  // Fails if a member has shut down without finishing call `sequence`. The rank of the
  // error is a rank of the communicator, not of the world. If the member has finished
  // the call, the call does not fail, because it can still complete on the other ranks.
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

// The data that the classes of one communicator share. Only the thread that runs a call
// uses `endpoints`. The other members are constant or thread-safe.
struct CommState {
  // If `resilient` is null, the communicator is static: no other epoch follows.
  CommState(CommunicatorOptions options, std::vector<std::unique_ptr<Link>> links,
            std::unique_ptr<Doorbell> doorbell, std::unique_ptr<SharedSegment> segment,
            std::shared_ptr<ResilientComm> resilient);

  int id() const { return options.id; }
  int rank() const { return options.topology.rank; }
  int size() const { return options.topology.size; }
  int world_rank() const { return options.world_ranks[rank()]; }
  // Returns "RINGJAX[world, epoch 0]: ", the start of every error text of the core.
  std::string Prefix() const;
  // Returns the sequence number of the call that was begun last. The load is relaxed,
  // so another thread may see an earlier number.
  uint64_t sequence() const { return progress->sequence(); }
  // Makes the links to `peers` that do not exist yet; see Endpoints::require.
  Status RequireLinks(std::span<const int> peers);
  // Returns a waiter for one call of this communicator.
  Waiter NewWaiter() const {
    return Waiter(doorbell.get(), &abort.flag(), options.spin_seconds,
                  ranks_per_cpu > 1);
  }

  // After construction only `cost` and `algorithm` change, in SetCostModel, which holds
  // the ticket lock, and topology.segment, in the first allreduce.
  CommunicatorOptions options;
  const std::unique_ptr<Doorbell> doorbell;
  // A ResilientComm with this communicator as its only epoch. It orders the calls that
  // run in this epoch only: the calls of an eager lane, the calls of a device, and all
  // calls before the communicator is installed in `resilient`. The abort of the
  // communicator ends `own`.
  const std::shared_ptr<ResilientComm> own;
  // The ResilientComm of which this communicator is an epoch; `own` in a static job.
  const std::shared_ptr<ResilientComm> resilient;
  const bool repairs;  // see ResilientComm::repairs
  const std::shared_ptr<Progress> progress;
  Endpoints endpoints;
  long ranks_per_cpu = 1;  // the ranks of this host for each of its CPUs, rounded up
  AbortState abort;
  std::atomic<uint64_t> finished{0};  // sequence number of the call finished last
};

}  // namespace ringjax
