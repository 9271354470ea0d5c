// How an epoch ends on a device before its time: the sentence, the watchdog, the abort.
// See cuda_communicator.h.
#include <algorithm>
#include <chrono>
#include <mutex>
#include <set>

#include "base/failpoint.h"
#include "device/bound.h"
#include "device/cuda_communicator.h"

namespace ringjax {
namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kTick = std::chrono::milliseconds(50);
constexpr auto kAbort = std::chrono::seconds(10);  // longer than one ever takes
constexpr double kTogether = 2;                    // seconds, for parting

// The communicators of this process that have joined NCCL.
std::mutex& living_mutex = *new std::mutex;
auto& living = *new std::set<const CudaCommunicator*>;

}  // namespace

Status CudaCommunicator::Check() const {
  if (!condemned()) return OkStatus();
  std::lock_guard lock(state_mutex_);
  if (sentence_.message().starts_with("RINGJAX[")) return sentence_;
  return Status(sentence_.code(), control_->Prefix() + sentence_.message(),
                sentence_.rank());
}

Status CudaCommunicator::Verdict() const {
  return finished_.load(std::memory_order_acquire) ? OkStatus() : Check();
}

// The sentence names the operation that failed if it is known, else this one.
Status CudaCommunicator::Refused(const Call& call) const {
  std::lock_guard lock(state_mutex_);
  if (sentence_.message().starts_with("RINGJAX[")) return sentence_;
  return control_->Named(call, sentence_);
}

// This rank cannot do its part: all must know, because theirs would never end.
Status CudaCommunicator::FailHere(const Call& call, const Status& status) {
  if (condemned()) return Refused(call);
  const std::string where =
      beside_.empty() ? ""
                      : " (its CUDA device " + std::to_string(options_.device) + ")";
  control_->GiveUp(status.code(), status.message() + where);
  Condemn(control_->Named(call, control_->abort_status()));
  return Refused(call);
}

void CudaCommunicator::Abort(const Status& status) { Condemn(status); }

// One device without its results is a process without them.
void CudaCommunicator::Condemn(const Status& status) {
  CondemnThis(status);
  for (const auto& other : beside_)
    if (const auto here = other.lock()) here->CondemnThis(status);
}

void CudaCommunicator::CondemnThis(const Status& status) {
  {
    std::lock_guard lock(state_mutex_);
    if (!sentence_.ok()) return;
    sentence_ = status;
    condemned_.store(true, std::memory_order_release);
  }
  state_changed_.notify_all();
}

void CudaCommunicator::Watch() {
  const Bound bound(driver_, context_);
  std::unique_lock lock(state_mutex_);
  while (!stopping_) {
    const bool sentenced = !sentence_.ok() && !executed_;
    if (!sentenced) {
      state_changed_.wait_for(lock, kTick);
      if (stopping_) break;
    }
    lock.unlock();
    if (condemned()) {
      Execute();
    } else {
      LookAround();
    }
    lock.lock();
  }
}

void CudaCommunicator::LookAround() {
  if (control_->aborted()) return Condemn(control_->abort_status());
  nccl::Outcome state = nccl::kSuccess;
  {
    std::lock_guard lock(nccl_mutex_);
    if (comm_ != nullptr) nccl_.CommGetAsyncError(comm_, &state);
  }
  if (state != nccl::kSuccess && state != nccl::kInProgress) {
    // NCCL knows that something broke; a moment later the heartbeat knows who.
    for (int i = 0; i < 100 && !control_->aborted(); ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    if (!control_->aborted())
      control_->GiveUp(Code::kUnavailable,
                       "met an error of " + nccl_.Check(state, "NCCL").message());
    return Condemn(control_->abort_status());
  }
  if (auditor_ && !auditor_->Drain(0)) return flights_->Restart();  // a peer is late
  const double limit = control_->options().collective_timeout;
  const auto oldest = flights_->Look();
  if (oldest && limit > 0 && oldest->seconds > limit) {
    control_->GiveUp(Code::kDeadlineExceeded,
                     "has waited on its device for " + oldest->title +
                         ", which does not end though every rank has called it");
    Condemn(control_->abort_status());
  }
}

bool CudaCommunicator::Awaited() const {
  return (condemned() || control_->aborted()) && !poisoned_;
}

void CudaCommunicator::Live(bool alive) const {
  std::lock_guard lock(living_mutex);
  if (alive)
    living.insert(this);
  else
    living.erase(this);
}

void CudaCommunicator::AwaitOthers() const {
  const auto limit = Clock::now() + std::chrono::duration<double>(kTogether);
  while (Clock::now() < limit) {
    {
      std::lock_guard lock(living_mutex);
      if (std::ranges::none_of(living, [](const auto* one) { return one->Awaited(); }))
        return;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

void CudaCommunicator::Execute() {
  {
    std::lock_guard lock(state_mutex_);
    if (executed_) return;
    executed_ = true;
  }
  (void)AtFailpoint(Failpoint::kCondemned);
  // The word first: whatever the abort ends early must find it set. A device that does
  // not even do this in two seconds computes nothing any more.
  if (driver_.MemsetD32Async(words_, 1, 1, side_stream_) == cuda::kSuccess)
    for (int i = 0; i < 2000; ++i) {
      if (!cuda::MayRun(driver_.StreamQuery(side_stream_))) break;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  poisoned_ = true;
  bool joined = false;
  {
    std::lock_guard lock(nccl_mutex_);
    joined = comm_ != nullptr;
  }
  // What an abort gives back, kernels of other ranks of the host may still read and
  // write, and giving it back waits for all kernels of this process, and may keep
  // others from the driver meanwhile. So all ranks come to this point before, and all
  // communicators of this process that end. All of them within a bound: who does not
  // come is no reason to stay.
  if (joined) {
    control_->PartTogether(kTogether);
    AwaitOthers();
  }
  {
    // Not waited for: NCCL may go on with it on a thread of its own, and from the call
    // on its handle is not to be asked any more.
    std::lock_guard lock(nccl_mutex_);
    if (comm_ != nullptr) nccl_.CommAbort(std::exchange(comm_, nullptr));
  }
  std::lock_guard lock(state_mutex_);
  aborted_ = true;
  state_changed_.notify_all();
}

// A group that is not settled may still be launched, behind whatever the stream is
// given from now on: memory that is given back, or given to others. An abort ends that.
Status CudaCommunicator::EndHere(const Call& call, const Status& status) {
  const Status failed = FailHere(call, status);
  std::unique_lock lock(state_mutex_);
  state_changed_.wait_for(lock, kAbort, [this] { return aborted_; });
  return failed;
}

}  // namespace ringjax
