// See nccl_comm.h.
#include "device/nccl_comm.h"

#include <chrono>
#include <string>
#include <thread>
#include <utility>

#include "device/eventually.h"
#include "engine/call/waiter.h"

namespace ringjax {
namespace {

using Clock = std::chrono::steady_clock;
constexpr double kFinalize = 5;  // seconds for ncclCommFinalize

}  // namespace

NcclComm::NcclComm(const nccl::Nccl& nccl, std::shared_ptr<Communicator> control,
                   const DeviceEpoch& epoch)
    : nccl_(nccl), control_(std::move(control)), epoch_(epoch) {}

Status NcclComm::Connect(const nccl::UniqueId& unique_id, double start_timeout,
                         const std::atomic<bool>& interrupted) {
  nccl::Config config;
  nccl::Comm joining = nullptr;
  Status status =
      nccl_.Check(nccl_.CommInitRankConfig(&joining, control_->size(), unique_id,
                                           control_->rank(), &config),
                  "ncclCommInitRankConfig");
  if (status.ok()) status = AwaitPeers(joining, start_timeout, interrupted);
  if (status.ok())
    comm_ = joining;
  else if (joining != nullptr)
    nccl_.CommAbort(joining);
  return status;
}

Status NcclComm::AwaitPeers(nccl::Comm joining, double start_timeout,
                            const std::atomic<bool>& interrupted) {
  nccl::Outcome outcome = nccl::kSuccess, state = nccl::kInProgress;
  const bool settled = Eventually(start_timeout, [&] {
    outcome = nccl_.CommGetAsyncError(joining, &state);
    return outcome != nccl::kSuccess || state != nccl::kInProgress ||
           control_->aborted() || interrupted;
  });
  if (interrupted) return Status(Code::kCancelled, "interrupted");
  if (control_->aborted()) return control_->abort_status();
  if (!settled)
    return Status(Code::kDeadlineExceeded,
                  "NCCL has not connected " + std::to_string(control_->size()) +
                      " ranks within " +
                      std::to_string(static_cast<int>(start_timeout)) +
                      " s; NCCL_DEBUG=WARN says more, and NCCL_SOCKET_IFNAME chooses "
                      "the network interface");
  RJ_TRY(nccl_.Check(outcome, "ncclCommGetAsyncError"));
  return nccl_.Check(state, "ncclCommInitRankConfig");
}

bool NcclComm::joined() {
  std::lock_guard lock(mutex_);
  return comm_ != nullptr;
}

Status NcclComm::Group(const Call& call, const std::function<Status()>& body) {
  Status status;
  {
    std::lock_guard lock(mutex_);
    if (comm_ == nullptr) {
      status = epoch_.Check();
      if (status.ok())
        status = control_->WithContext(
            call, {Code::kFailedPrecondition, "ringjax is shut down"});
    }
    if (status.ok()) status = nccl_.Check(nccl_.GroupStart(), "ncclGroupStart");
    if (status.ok()) {
      status = body();
      // End the group even if `body` failed: otherwise this thread would stay in the
      // group.
      const nccl::Outcome ended = nccl_.GroupEnd();
      if (status.ok()) status = nccl_.Check(ended, "ncclGroupEnd", comm_);
    }
  }
  if (status.ok()) status = Settle();
  return status;
}

// Waits until NCCL has launched the last group. The communicator is non-blocking, so
// NCCL may launch a group some time after ncclGroupEnd: the first groups wait for
// connections with the peers. Before the launch the stream may get no other work.
// After an error, NCCL may still launch the group later; see DeviceEpoch::EndHere.
Status NcclComm::Settle() {
  const auto start = Clock::now();
  const double limit = control_->options().collective_timeout;
  while (true) {
    nccl::Outcome state = nccl::kSuccess;
    {
      std::lock_guard lock(mutex_);
      if (comm_ == nullptr) return epoch_.Check();
      RJ_TRY(nccl_.Check(nccl_.CommGetAsyncError(comm_, &state), "NCCL", comm_));
      if (state != nccl::kInProgress) return nccl_.Check(state, "NCCL", comm_);
    }
    if (epoch_.aborted()) return epoch_.Check();
    if (InterruptCheck check = interrupt_check.load(); check != nullptr && check())
      return Status(Code::kCancelled, "was interrupted");
    const double waited = std::chrono::duration<double>(Clock::now() - start).count();
    if (limit > 0 && waited > limit)
      return Status(Code::kDeadlineExceeded,
                    "has waited " + std::to_string(static_cast<int>(limit)) +
                        " s for NCCL to connect its peers");
    if (waited < 200e-6)
      std::this_thread::yield();
    else
      std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

nccl::Outcome NcclComm::State() {
  nccl::Outcome state = nccl::kSuccess;
  std::lock_guard lock(mutex_);
  if (comm_ != nullptr) nccl_.CommGetAsyncError(comm_, &state);
  return state;
}

// ncclCommFinalize flushes the data that peers may still need: NCCL's proxy threads may
// hold bytes after the kernels that produced them have ended.
bool NcclComm::Finish() {
  nccl::Outcome outcome = nccl::kSuccess, state = nccl::kSuccess;
  {
    std::lock_guard lock(mutex_);
    if (comm_ == nullptr ||
        !nccl_.Check(nccl_.CommFinalize(comm_), "ncclCommFinalize").ok())
      return false;
  }
  const bool settled = Eventually(kFinalize, [&] {
    std::lock_guard lock(mutex_);
    outcome = comm_ == nullptr ? nccl::kInternalError
                               : nccl_.CommGetAsyncError(comm_, &state);
    return outcome != nccl::kSuccess || state != nccl::kInProgress;
  });
  if (!settled || outcome != nccl::kSuccess || state != nccl::kSuccess) return false;
  std::lock_guard lock(mutex_);
  if (comm_ == nullptr) return false;
  nccl_.CommDestroy(std::exchange(comm_, nullptr));
  return true;
}

// ncclCommAbort may return before NCCL has finished: NCCL may continue the abort on a
// thread of its own. The handle must not be used after this call.
void NcclComm::Abort() {
  std::lock_guard lock(mutex_);
  if (comm_ != nullptr) nccl_.CommAbort(std::exchange(comm_, nullptr));
}

}  // namespace ringjax
