// See watchdog.h.
#include "device/watchdog.h"

#include <algorithm>
#include <chrono>
#include <mutex>
#include <set>
#include <utility>

#include "base/failpoint.h"
#include "device/current_context.h"
#include "device/eventually.h"

namespace ringjax {
namespace {

constexpr auto kTick = std::chrono::milliseconds(50);
// The longest time, in seconds, for which an abort of NCCL waits for its own device,
// and then for other ranks.
constexpr double kTeardownWait = 2;

// The epochs of the communicators of this process that are connected and not closed.
std::mutex& living_mutex = *new std::mutex;
auto& living = *new std::set<const DeviceEpoch*>;

// Adds `epoch` to `living` if `alive`, otherwise removes it.
void SetLiving(const DeviceEpoch* epoch, bool alive) {
  std::lock_guard lock(living_mutex);
  if (alive)
    living.insert(epoch);
  else
    living.erase(epoch);
}

void AwaitOtherDevices() {
  Eventually(kTeardownWait, [] {
    std::lock_guard lock(living_mutex);
    return std::ranges::none_of(living,
                                [](const auto* one) { return one->IsUnpoisoned(); });
  });
}

}  // namespace

Watchdog::Watchdog(std::shared_ptr<Communicator> control, const DeviceResources& device,
                   DeviceEpoch& epoch, NcclComm& comm)
    : control_(std::move(control)), device_(device), epoch_(epoch), comm_(comm) {}

void Watchdog::Start(ConsistencyChecker* checker) {
  SetLiving(&epoch_, true);
  thread_ = std::thread([this, checker] { Watch(checker); });
}

void Watchdog::Stop() {
  if (thread_.joinable()) thread_.join();
  PoisonAndAbortNccl();
  SetLiving(&epoch_, false);
}

void Watchdog::Watch(ConsistencyChecker* checker) {
  const CurrentContext current(device_.driver(), device_.context());
  while (epoch_.AwaitAbort(kTick)) {
    if (epoch_.aborted()) {
      PoisonAndAbortNccl();
    } else {
      LookAround(checker);
    }
  }
}

void Watchdog::LookAround(ConsistencyChecker* checker) {
  if (control_->aborted()) return epoch_.Abort(control_->abort_status());
  const nccl::Outcome state = comm_.State();
  if (state != nccl::kSuccess && state != nccl::kInProgress) {
    // NCCL does not report which rank caused the error. Wait 1 s at most for the
    // heartbeat, which aborts the control communicator when it finds a lost rank.
    if (!Eventually(1, [this] { return control_->aborted(); }))
      control_->AbortAndNotifyPeers(
          Code::kUnavailable,
          "met an error of " + comm_.nccl().Check(state, "NCCL").message());
    return epoch_.Abort(control_->abort_status());
  }
  // Until all calls are compared, a peer may be late. The timeout of the control
  // communicator covers that time; the timeout on the device begins afterwards.
  if (checker && !checker->Drain(0)) return device_.in_flight()->Restart();
  const double limit = control_->options().collective_timeout;
  const auto oldest = device_.in_flight()->PollOldest();
  if (oldest && limit > 0 && oldest->seconds > limit) {
    control_->AbortAndNotifyPeers(
        Code::kDeadlineExceeded,
        "has waited on its device for " + oldest->title +
            ", which does not end though every rank has called it");
    epoch_.Abort(control_->abort_status());
  }
}

void Watchdog::PoisonAndAbortNccl() {
  if (!epoch_.BeginTeardown()) return;
  (void)AtFailpoint(Failpoint::kDeviceAborted);
  // Set the poison word before the abort: the kernels behind an NCCL kernel that the
  // abort ends early must find the word set. A device that does not execute even this
  // memset within two seconds computes nothing any more. There is no word if the device
  // could not be opened.
  const cuda::Driver& driver = device_.driver();
  if (device_.poison_word() != 0 &&
      driver.MemsetD32Async(device_.poison_word(), 1, 1, device_.side_stream()) ==
          cuda::kSuccess)
    Eventually(kTeardownWait, [&] {
      return !cuda::MayRun(driver.StreamQuery(device_.side_stream()));
    });
  epoch_.SetPoisoned();
  // ncclCommAbort frees memory that kernels of other ranks of the host may still use.
  // It also waits for all kernels of this process, and may block the driver for other
  // threads meanwhile. So wait until all live ranks, and all aborted communicators of
  // this process, have set their poison words and are ready for the abort; for a
  // limited time, because some rank may never be ready.
  if (comm_.joined()) {
    control_->heartbeat().AwaitTeardown(kTeardownWait);
    AwaitOtherDevices();
  }
  comm_.Abort();
  epoch_.SetNcclAborted();
}

}  // namespace ringjax
