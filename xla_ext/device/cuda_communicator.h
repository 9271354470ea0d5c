// A communicator of CUDA devices: the ranks of one process set, connected by NCCL.
//
// Each rank has one device in a communicator. A process with several devices has one
// communicator for each device, which connects it with the devices of the same index in
// the other processes. The communicators of a process have no common order of calls and
// compare their calls separately, because a program over some of the devices is not
// ordered with a program over others. If one of these communicators aborts, all abort.
//
// A call consists of addresses, types, shapes and a stream, from XLA or from any other
// framework. A call is enqueued, and its caller never waits for the device. Three
// helpers work meanwhile: the control communicator, a host communicator of the same
// ranks; the consistency checker, which compares calls over the control communicator;
// and the watchdog.
//
// The first failure aborts the epoch. From then on calls are refused. The watchdog sets
// a word in device memory that turns later floating-point results into NaN, and only
// then aborts NCCL. The order matters: an abort ends NCCL's kernels early, after which
// the stream continues with garbage and reports success. A new epoch needs a new
// object.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "device/consistency_checker.h"
#include "device/cuda_collectives.h"
#include "device/cuda_overlap.h"
#include "device/device_epoch.h"
#include "device/device_resources.h"
#include "device/nccl_comm.h"
#include "device/watchdog.h"
#include "engine/communicator/communicator.h"

namespace ringjax {

struct CudaOptions {
  int id = 0;                  // id of the process set
  int device = 0;              // CUDA ordinal
  double start_timeout = 120;  // seconds for NCCL to connect all ranks
  FusionOptions fusion;
  bool comm_stream = true;  // false: Start uses the stream of the caller
  // If false, the caller itself compares each call between the ranks before the call.
  bool checks_consistency = true;
  bool shares = false;  // NCCL is set up to allow several ranks on one GPU
  bool timed = true;    // the recorder receives the times of operations on the device
};

// Runs the collectives of one device, one call at a time. Safe from any thread.
class CudaCommunicator : public std::enable_shared_from_this<CudaCommunicator> {
 public:
  using Workspace = CudaCollectives::Workspace;

  // One device of this process, with the control communicator and the NCCL id that
  // connect it with the devices of the other ranks.
  struct Place {
    int device = 0;
    std::shared_ptr<Communicator> control;
    nccl::UniqueId unique_id{};
  };
  using All = std::vector<std::shared_ptr<CudaCommunicator>>;

  // Connects all devices of this process at once. All ranks of the control
  // communicators call Connect with the same NCCL ids in the same order, and each waits
  // for all ranks. If one device fails, aborts the control communicators of all
  // `places`.
  static Result<All> Connect(const CudaOptions& options, std::span<const Place> places);
  // Connect one device in two steps. Between the steps, the caller (EagerCuda) finds
  // out whether Prepare has succeeded on all ranks. Prepare uses only the device of
  // this rank; Join waits for all ranks. A failure of either step aborts no other
  // communicator.
  static Result<std::shared_ptr<CudaCommunicator>> Prepare(
      CudaOptions options, std::shared_ptr<Communicator> control);
  Status Join(const nccl::UniqueId& unique_id);
  ~CudaCommunicator();

  const CudaOptions& options() const { return options_; }
  const Communicator& control() const { return *control_; }
  // Returns the record of whether and why this epoch is aborted.
  DeviceEpoch& epoch() { return epoch_; }
  const DeviceEpoch& epoch() const { return epoch_; }
  // Returns the communicator of `all` whose device has the CUDA context that is current
  // on this thread. If no context is current, returns the only communicator of `all`;
  // the driver then refuses streams of another device. Returns null in all other cases.
  static CudaCommunicator* Here(const All& all);

  // Enqueues one call on `stream`. Without a workspace, the fused buffer comes from the
  // driver's memory pool.
  Status Run(const Call& call, cuda::Stream stream, const Workspace& workspace = {});

  // Enqueues one call on the communication stream. The call begins after the events
  // `after`, and the event `done` is recorded after the call.
  Status RunAfter(const Call& call, std::span<const cuda::Event> after,
                  cuda::Event done);
  // Runs `enqueue` with the communication stream, while no call is being enqueued.
  // Fails with kFailedPrecondition after Close.
  Status OnCommStream(const std::function<Status(cuda::Stream)>& enqueue);

  // Starts an allreduce that overlaps the later work of `stream` and begins after the
  // work that is enqueued there now. Between Start and Done only the allreduce may use
  // the tensors' `out`. `site` identifies the chain and the bucket (overlap.h); `first`
  // marks the first bucket of a training step. Done makes `stream` wait for the
  // results.
  Status Start(Call call, int64_t site, bool first, cuda::Stream stream);
  Status Done(const Call& call, int64_t site, cuda::Stream stream);

  // Waits until `stream` and the communication stream are idle. Fails if a failure has
  // made results invalid.
  Status Synchronize(cuda::Stream stream);
  // Waits until all calls so far, on any stream, have ended. Returns ok if all calls
  // have valid results and all ranks have made the same calls.
  Status Confirm();

  // Waits for the enqueued calls unless the communicator is aborted, then ends NCCL and
  // releases the device. The collective timeout, if there is one, bounds the wait.
  void Close();

  std::map<std::string, CudaStats> stats() const;

 private:
  using Work = CudaCollectives::Work;

  CudaCommunicator(CudaOptions options, std::shared_ptr<Communicator> control,
                   const cuda::Driver& driver, const nccl::Nccl& nccl);

  // The functions below are in cuda_connect.cc.

  Status Open();
  using Joining = std::pair<CudaCommunicator*, nccl::UniqueId>;
  // On failure, `*culprit` is the index of the device that failed first.
  static Status JoinAll(std::span<const Joining> all, size_t* culprit);
  Status JoinNccl(const nccl::UniqueId& unique_id,
                  const std::atomic<bool>& interrupted);
  void Begin();
  // Waits up to `seconds` until no operation is in flight and all calls are compared.
  Status Settled(double seconds);
  bool Finish();  // ends NCCL without an abort; false if that failed or took too long

  // A call that was made before: the record that ranks compare, and the fusion plan.
  struct KnownCall {
    std::shared_ptr<const CallRecord> record;
    FusionPlan plan;
  };

  // The functions below are in cuda_communicator.cc.

  // Returns the entry of `call` in known_calls_, so that a repeated call is neither
  // validated nor planned again. Valid until the next Recall.
  const KnownCall& Recall(const Call& call);
  // Refuses calls of an aborted epoch, and all calls after Close has begun.
  Status Admit(const Call& call) const;
  // Queues the call for comparison between the ranks, enqueues its work on `stream` and
  // adds the call to the statistics.
  Status Serve(const Call& call, cuda::Stream stream, const Workspace& workspace);
  Status ServeOnCommStream(const Call& call);
  Status StartOn(Call* call, int64_t site, bool first, cuda::Stream stream);
  Status DoneOn(const Call& call, int64_t site, cuda::Stream stream);
  Status EnqueueTracked(Work* work);
  Status Enqueue(Work* work);
  // Returns `status`. If `status` is an error, makes `stream` wait for the
  // communication stream.
  Status Leave(cuda::Stream stream, Status status);

  const CudaOptions options_;
  const std::shared_ptr<Communicator> control_;
  const cuda::Driver& driver_;

  DeviceEpoch epoch_;
  DeviceResources device_;
  NcclComm nccl_comm_;
  Watchdog watchdog_;
  // Made by Begin and destroyed by Close; null if there is only one rank, or if the
  // caller compares the calls (CudaOptions::checks_consistency).
  std::unique_ptr<ConsistencyChecker> checker_;

  // Lock order: turn_mutex_, the mutex of nccl_comm_, the mutex of epoch_. No other
  // lock is taken while state_mutex_ is held.
  std::mutex turn_mutex_;  // serves one caller at a time; guards the next three
  std::unordered_map<uint64_t, std::unique_ptr<KnownCall>> known_calls_;
  CudaCollectives collectives_;
  CudaOverlap overlap_;

  std::atomic<bool> closing_{false};  // Close has begun: calls are refused
  mutable std::mutex state_mutex_;    // guards the rest
  bool closed_ = false;
  std::map<std::string, CudaStats> stats_;
};

}  // namespace ringjax
