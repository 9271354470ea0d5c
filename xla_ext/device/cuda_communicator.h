// A communicator of CUDA devices: one process set's ranks joined by NCCL.
//
// A rank has one device in it. A process with several has one of these for each, which
// joins it with the devices of the same place in the other processes. Their calls are
// nothing to each other, and each compares its own, because programs over some of the
// devices come in no order with programs over others; but they are condemned together.
//
// It takes addresses, types, shapes and a stream, whoever made them: XLA, or any other
// framework. Calls are enqueued and never wait for the device. Three others work
// beside: the `control` communicator, which joins the same ranks over the host's own
// links; the auditor, which compares calls over it; and a watchdog thread.
//
// Failure: the first reason *condemns* the epoch. From then on calls are refused; the
// watchdog sets a word on the device that makes every later result NaN, and only then
// aborts NCCL: the kernels end early, and a stream that finishes "successfully" with
// garbage must not look as if it had succeeded. A new epoch is a new object.
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

#include "device/auditor.h"
#include "device/flights.h"
#include "device/fusion.h"
#include "device/kernels.h"
#include "device/nccl.h"
#include "engine/communicator/communicator.h"
#include "engine/communicator/overlap.h"

namespace ringjax {

struct CudaOptions {
  int id = 0;      // of the process set
  int device = 0;  // CUDA ordinal
  double start_timeout = 120;
  FusionOptions fusion;
  bool comm_stream = true;  // false: Start works on the caller's stream
  bool audited = true;      // false: the caller compares calls before they come here
  bool shares = false;      // NCCL has been told that ranks may share a GPU
  bool timed = true;        // the recorder hears how long operations take on it
};

// What was enqueued, per collective. `seconds` is time of the host in these calls.
struct CudaStats {
  uint64_t calls = 0, bytes = 0, packed_bytes = 0, launches = 0, nccl_ops = 0;
  double seconds = 0;
};

class CudaCommunicator : public std::enable_shared_from_this<CudaCommunicator> {
 public:
  // Device memory for the fused buffer, free for reuse when the work that is enqueued
  // on the call's stream until the end of the call is done.
  using Workspace = std::function<Result<cuda::Pointer>(size_t bytes)>;

  // One device of this process, and what it is joined with others by.
  struct Place {
    int device = 0;
    std::shared_ptr<Communicator> control;
    nccl::UniqueId unique_id{};
  };
  using All = std::vector<std::shared_ptr<CudaCommunicator>>;

  // All devices of this process at once. Every rank of the controls calls it with the
  // same ids in the same order; waits for all of them. A failure of one ends all of
  // `places`' controls, and with them what watches them.
  static Result<All> Connect(const CudaOptions& options, std::span<const Place> places);
  // The same in two halves, of one device, for ranks that have another way to tell each
  // other how they fare. The first uses this rank's device only; a failure of either
  // ends nothing else.
  static Result<std::shared_ptr<CudaCommunicator>> Prepare(
      CudaOptions options, std::shared_ptr<Communicator> control);
  Status Join(const nccl::UniqueId& unique_id);
  ~CudaCommunicator();

  const CudaOptions& options() const { return options_; }
  const Communicator& control() const { return *control_; }
  bool condemned() const { return condemned_.load(std::memory_order_acquire); }
  // Why calls are refused; ok while they are not.
  Status Check() const;
  // The one of `all` whose device's context is current on this thread, or the only one
  // if none is: then the driver refuses streams of another device. Else null.
  static CudaCommunicator* Here(const All& all);

  // Enqueues one call. Without a workspace, memory comes from the driver's pool.
  Status Run(const Call& call, cuda::Stream stream, const Workspace& workspace = {});

  // Enqueues one call on the communication stream: begins when `after` have happened;
  // `done` happens when its results are there.
  Status RunBeside(const Call& call, std::span<const cuda::Event> after,
                   cuda::Event done);
  // Lets `enqueue` have the communication stream, between two calls.
  Status Beside(const std::function<Status(cuda::Stream)>& enqueue);
  // Whether what was enqueued comes, or came, to the results it should.
  Status Verdict() const;

  // An allreduce beside the work of `stream`, from what is enqueued there now. Between
  // Start and Done the tensors' `out` belong to it. `first`: of a step, as in
  // overlap.h.
  Status Start(Call call, int64_t site, bool first, cuda::Stream stream);
  Status Done(const Call& call, int64_t site, cuda::Stream stream);

  // Waits until everything enqueued on both streams is done; tells if it is void.
  Status Synchronize(cuda::Stream stream);
  // The same for every call until now, on whichever streams. If it is ok, all of them
  // have the results they should, and all ranks have called the same.
  Status Confirm();

  void Abort(const Status& status);
  void Close();  // in good order if it is not condemned; bounded in time

  std::map<std::string, CudaStats> stats() const;

 private:
  // A call that was seen before: what ranks compare, and the plan that goes with it.
  struct Known {
    std::shared_ptr<const CallRecord> record;
    FusionPlan plan;
  };
  struct Site {
    cuda::Event ready = nullptr, done = nullptr;
    bool pending = false, on_stream = false;
    std::vector<const void*> results;  // where Start left them
  };
  // What one call works with.
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
  // The first of `all` to fail is `culprit`.
  static Status JoinAll(std::span<const Joining> all, size_t* culprit);
  Status JoinNccl(const nccl::UniqueId& unique_id,
                  const std::atomic<bool>& interrupted);
  void Begin();
  Status AwaitPeers(nccl::Comm joining, const std::atomic<bool>& interrupted);
  Status Settled(double seconds);  // nothing is on its way any more, in this time
  bool Finish();  // NCCL, in good order; false if that was not possible in time
  void ReleaseDevice();

  // cuda_communicator.cc
  Status Serve(const Call& call, cuda::Stream stream, const Workspace& workspace);
  Status StartOn(Call* call, int64_t site, bool first, cuda::Stream stream);
  Status DoneOn(const Call& call, int64_t site, cuda::Stream stream);
  Status Fly(Work* work);
  // What a caller gets, and what its stream waits for, when a call ends without
  // success.
  Status Leave(cuda::Stream stream, Status status);
  const Known& Recall(const Call& call);
  Status Admit(const Call& call) const;
  Status TakeBack(bool first, int64_t site);
  Result<Site*> SiteOf(int64_t site);
  Result<cuda::Pointer> Scratch(size_t bytes);

  // cuda_failure.cc
  Status Refused(const Call& call) const;
  Status FailHere(const Call& call, const Status& status);
  // The same where NCCL has been given something; returns when it is aborted.
  Status EndHere(const Call& call, const Status& status);
  void Condemn(const Status& status);  // and the other devices of the process
  void CondemnThis(const Status& status);
  void Watch();
  void LookAround();
  void Execute();  // the sentence: poison, part from the other ranks, abort
  void Live(bool alive) const;  // among the communicators of this process
  bool Awaited() const;         // it ends, and its device has not been told
  void AwaitOthers() const;

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
  // One NCCL group of what `body` issues, begun and settled.
  Status Group(Work* work, const std::function<Status()>& body);
  Status Settle();
  // A part of a result that one failure would spoil as a whole.
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

  // The other devices of this process; set before any thread knows this.
  std::vector<std::weak_ptr<CudaCommunicator>> beside_;
  cuda::Context context_ = nullptr;
  std::unique_ptr<cuda::Kernels> kernels_;
  cuda::Stream comm_stream_ = nullptr, side_stream_ = nullptr;
  cuda::Event fence_ = nullptr;
  cuda::Pointer words_ =
      0;  // of the driver's pool: poison, and four bytes for barriers
  std::unique_ptr<Flights> flights_;
  std::unique_ptr<Auditor> auditor_;

  std::mutex turn_mutex_;  // one caller at a time; guards the next five
  std::unordered_map<uint64_t, std::unique_ptr<Known>> known_;
  std::map<int64_t, Site> sites_;
  cuda::Pointer scratch_ = 0;
  size_t scratch_bytes_ = 0;
  std::vector<cuda::Patch> patches_;  // kept for its memory

  std::mutex nccl_mutex_;  // nobody is inside NCCL while it is aborted
  nccl::Comm comm_ = nullptr;

  std::atomic<bool> condemned_{false}, poisoned_{false};
  mutable std::mutex state_mutex_;  // guards the rest
  std::condition_variable state_changed_;
  Status sentence_;
  bool executed_ = false, aborted_ = false, stopping_ = false, closed_ = false;
  std::atomic<bool> closing_{false};
  std::atomic<bool> finished_{false};  // everything, before NCCL was left
  std::map<std::string, CudaStats> stats_;
  std::thread watchdog_;
};

}  // namespace ringjax
