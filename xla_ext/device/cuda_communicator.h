// A communicator of CUDA devices: the ranks of one process set, connected by NCCL.
//
// Each rank has one device in a communicator. A process with several devices has one
// communicator for each device, which connects it with the devices of the same index in
// the other processes. The communicators of a process have no common order of calls and
// compare their calls separately, because a program over some of the devices is not
// ordered with a program over others. They abort together.
//
// A call consists of addresses, types, shapes and a stream, from XLA or from any other
// framework. A call is enqueued, and its caller never waits for the device. Three
// helpers work meanwhile: the control communicator, a host communicator of the same
// ranks; the consistency checker, which compares calls over the control communicator;
// and a watchdog thread.
//
// The first failure aborts the epoch. From then on calls are refused. The watchdog sets
// a word in device memory that turns later floating-point results into NaN, and only
// then aborts NCCL. The order matters: an abort ends NCCL's kernels early, after which
// the stream goes on with garbage and reports success. A new epoch needs a new object.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "device/consistency_checker.h"
#include "device/fusion.h"
#include "device/in_flight.h"
#include "device/kernels.h"
#include "device/nccl.h"
#include "engine/communicator/communicator.h"
#include "engine/communicator/overlap.h"

namespace ringjax {

struct CudaOptions {
  int id = 0;                  // number of the process set
  int device = 0;              // CUDA ordinal
  double start_timeout = 120;  // seconds for NCCL to connect all ranks
  FusionOptions fusion;
  bool comm_stream = true;  // false: Start uses the stream of the caller
  // false: the caller compares each call between the ranks before it makes the call.
  bool checks_consistency = true;
  bool shares = false;  // NCCL is set up to allow several ranks on one GPU
  bool timed = true;    // the recorder receives the times of operations on the device
};

// Totals of one collective. `seconds` is the time that the host spent in the calls.
struct CudaStats {
  uint64_t calls = 0, bytes = 0, packed_bytes = 0, launches = 0, nccl_ops = 0;
  double seconds = 0;
};

// Safe from any thread; calls are served one at a time.
class CudaCommunicator : public std::enable_shared_from_this<CudaCommunicator> {
 public:
  // Allocates device memory for the fused buffer. The memory may be reused once the
  // stream of the call has passed all work of the call.
  using Workspace = std::function<Result<cuda::Pointer>(size_t bytes)>;

  // One device of this process, with the control communicator and the NCCL id that
  // connect it with the devices of the other ranks.
  struct Place {
    int device = 0;
    std::shared_ptr<Communicator> control;
    nccl::UniqueId unique_id{};
  };
  using All = std::vector<std::shared_ptr<CudaCommunicator>>;

  // Connects all devices of this process at once. All ranks of the control
  // communicators call it with the same NCCL ids in the same order, and each waits for
  // all ranks. If one device fails, aborts the control communicators of all `places`.
  static Result<All> Connect(const CudaOptions& options, std::span<const Place> places);
  // Connect for one device in two halves, for a caller that exchanges between them
  // whether the first half succeeded on all ranks (EagerCuda). Prepare uses only the
  // device of this rank; Join waits for all ranks. A failure of either half aborts no
  // other communicator.
  static Result<std::shared_ptr<CudaCommunicator>> Prepare(
      CudaOptions options, std::shared_ptr<Communicator> control);
  Status Join(const nccl::UniqueId& unique_id);
  ~CudaCommunicator();

  const CudaOptions& options() const { return options_; }
  const Communicator& control() const { return *control_; }
  bool aborted() const { return aborted_.load(std::memory_order_acquire); }
  // The reason of the abort; ok if the communicator is not aborted.
  Status Check() const;
  // The communicator of `all` whose device has the CUDA context that is current on this
  // thread. If no context is current, the only communicator of `all`: the driver then
  // refuses streams of another device. Otherwise null.
  static CudaCommunicator* Here(const All& all);

  // Enqueues one call on `stream`. Without a workspace, the fused buffer comes from the
  // driver's memory pool.
  Status Run(const Call& call, cuda::Stream stream, const Workspace& workspace = {});

  // Enqueues one call on the communication stream. The call begins after the events
  // `after`, and `done` is recorded behind its results.
  Status RunAfter(const Call& call, std::span<const cuda::Event> after,
                  cuda::Event done);
  // Runs `enqueue` with the communication stream, between two calls.
  // kFailedPrecondition after Close.
  Status OnCommStream(const std::function<Status(cuda::Stream)>& enqueue);
  // Ok if the results of all calls that were enqueued are valid or will be.
  Status Health() const;

  // Starts an allreduce that overlaps the later work of `stream` and begins after the
  // work that is enqueued there now. Between Start and Done only the allreduce may use
  // the tensors' `out`. `site` is chain and bucket, as in overlap.h; `first` marks the
  // first bucket of a training step. Done makes `stream` wait for the results.
  Status Start(Call call, int64_t site, bool first, cuda::Stream stream);
  Status Done(const Call& call, int64_t site, cuda::Stream stream);

  // Waits until `stream` and the communication stream are idle. Fails on void results.
  Status Synchronize(cuda::Stream stream);
  // Waits until all calls so far, on any stream, have ended. Ok if all of them have
  // valid results and all ranks have made the same calls.
  Status Confirm();

  // Aborts the epoch on all devices of this process. The first reason counts.
  void Abort(const Status& status);
  // Waits for the enqueued calls unless the communicator is aborted, then ends NCCL and
  // releases the device. Takes bounded time if there is a collective timeout.
  void Close();

  std::map<std::string, CudaStats> stats() const;

 private:
  // A cached call: the record that ranks compare, and the fusion plan.
  struct Known {
    std::shared_ptr<const CallRecord> record;
    FusionPlan plan;
  };
  // A bucket of an overlap window. `pending`: between Start and Done. `on_stream`:
  // Start used the stream of the caller.
  struct Site {
    cuda::Event ready = nullptr, done = nullptr;
    bool pending = false, on_stream = false;
    std::vector<const void*> results;  // addresses at which Start left them
  };
  // The arguments and the statistics of one call.
  struct Work {
    const Call& call;
    const FusionPlan& plan;
    cuda::Stream stream;
    const Workspace& workspace;
    CudaStats used;
  };

  CudaCommunicator(CudaOptions options, std::shared_ptr<Communicator> control,
                   const cuda::Driver& driver, const nccl::Nccl& nccl);

  // cuda_connect.cc
  Status Open();
  Status OpenDevice();
  using Joining = std::pair<CudaCommunicator*, nccl::UniqueId>;
  // On failure, `*culprit` is the index of the device that failed first.
  static Status JoinAll(std::span<const Joining> all, size_t* culprit);
  Status JoinNccl(const nccl::UniqueId& unique_id,
                  const std::atomic<bool>& interrupted);
  void Begin();
  Status AwaitPeers(nccl::Comm joining, const std::atomic<bool>& interrupted);
  // Waits until no operation is in flight and all calls are compared.
  Status Settled(double seconds);
  bool Finish();  // ends NCCL without an abort; false if that failed or took too long
  void ReleaseDevice();

  // cuda_communicator.cc
  Status Serve(const Call& call, cuda::Stream stream, const Workspace& workspace);
  Status StartOn(Call* call, int64_t site, bool first, cuda::Stream stream);
  Status DoneOn(const Call& call, int64_t site, cuda::Stream stream);
  Status EnqueueTracked(Work* work);
  // Returns `status`. If that is an error, makes `stream` wait for the communication
  // stream.
  Status Leave(cuda::Stream stream, Status status);
  const Known& Recall(const Call& call);
  Status Admit(const Call& call) const;
  Status TakeBack(bool first, int64_t site);
  Result<Site*> SiteOf(int64_t site);
  Result<cuda::Pointer> Scratch(size_t bytes);

  // cuda_failure.cc
  Status Refused(const Call& call) const;
  Status FailHere(const Call& call, const Status& status);
  // Like FailHere, for a call that has already issued NCCL operations: also waits for
  // the abort of NCCL.
  Status EndHere(const Call& call, const Status& status);
  void AbortEpoch(const Status& status);  // on all devices of the process
  void AbortThis(const Status& status);
  void Watch();
  void LookAround();
  void PoisonAndAbortNccl();    // poison, teardown barrier, ncclCommAbort
  void Live(bool alive) const;  // adds this to or removes it from `living`
  bool IsUnpoisoned() const;    // aborted, and the device is not poisoned yet
  void AwaitOtherDevices() const;

  // cuda_collectives.cc
  Status Enqueue(Work* work);
  Status Fused(Work* work);
  bool Alone() const;
  Status CopyThrough(Work* work);
  Status Allgather(Work* work);
  Status Reducescatter(Work* work);
  struct Scattered;
  Status Scatter(Work* work, const Scattered& tensor, DType dtype);
  Status Alltoall(Work* work);
  Status Barrier(Work* work);
  // Makes one NCCL group of the operations that `body` issues, and waits until NCCL has
  // launched the group (Settle).
  Status Group(Work* work, const std::function<Status()>& body);
  Status Settle();
  // A piece of a result that is poisoned by itself.
  struct Sealed {
    size_t tensor;
    uint64_t offset, bytes;
  };
  Status Seal(Work* work, const std::vector<Sealed>& pieces);
  Status SealBlocks(Work* work,
                    const std::function<std::pair<size_t, size_t>(size_t)>& place);
  Status Issued(Work* work, nccl::Outcome outcome, std::string_view what);
  cuda::Kernels::Target TargetOf(Work* work, cuda::Pointer fused) const;

  int rank() const { return control_->rank(); }
  int size() const { return control_->size(); }

  const CudaOptions options_;
  const std::shared_ptr<Communicator> control_;
  const cuda::Driver& driver_;
  const nccl::Nccl& nccl_;

  // The communicators of the other devices of this process. Set before any other thread
  // can reach this object.
  std::vector<std::weak_ptr<CudaCommunicator>> beside_;
  cuda::Context context_ = nullptr;
  std::unique_ptr<cuda::Kernels> kernels_;
  cuda::Stream comm_stream_ = nullptr, side_stream_ = nullptr;
  cuda::Event fence_ = nullptr;
  // From the driver's memory pool. Word 0 is the poison word; barriers use word 1.
  cuda::Pointer words_ = 0;
  std::unique_ptr<InFlight> in_flight_;
  std::unique_ptr<ConsistencyChecker> checker_;

  // Lock order: turn_mutex_, nccl_mutex_, state_mutex_.
  std::mutex turn_mutex_;  // one caller at a time; guards the next five
  std::unordered_map<uint64_t, std::unique_ptr<Known>> known_;
  std::map<int64_t, Site> sites_;
  cuda::Pointer scratch_ = 0;
  size_t scratch_bytes_ = 0;
  std::vector<cuda::Patch> patches_;  // kept between calls for its capacity

  // Guards comm_, and is held during every NCCL call on comm_: no thread may be in NCCL
  // when another one aborts comm_.
  std::mutex nccl_mutex_;
  nccl::Comm comm_ = nullptr;

  std::atomic<bool> aborted_{false}, poisoned_{false};
  mutable std::mutex state_mutex_;  // guards the rest
  std::condition_variable state_changed_;
  Status abort_reason_;
  bool teardown_begun_ = false, nccl_aborted_ = false, stopping_ = false,
       closed_ = false;
  std::atomic<bool> closing_{false};   // Close has begun: calls are refused
  std::atomic<bool> finished_{false};  // NCCL ended after all calls: results are valid
  std::map<std::string, CudaStats> stats_;
  std::thread watchdog_;
};

}  // namespace ringjax
