// Decides when the lane's own thread leaves the progress lock to callers. See
// progress_lock.h.
#include "engine/eager/progress_lock.h"

#include <chrono>
#include <utility>

namespace ringjax {
namespace {

// After this time without callers, the lane's own thread takes the progress lock again.
// Until then, a round that a peer begins waits for this rank. That delays no operation,
// because every operation needs a submission of this rank, which has submitted none. On
// a CPU that many ranks share, the time is longer by their number: a call takes longer,
// and if the lane's own threads began rounds while callers wait for the CPU, each
// operation would take several rounds.
constexpr auto kPause = std::chrono::milliseconds(5);

}  // namespace

ProgressLock::ProgressLock(LaneState& state, const TaskQueue& tasks)
    : state_(state), communicator_(state.communicator), tasks_(tasks) {}

void ProgressLock::StandAside(std::unique_lock<std::mutex>* progress) {
  if (callers_.load(std::memory_order_relaxed) == callers_seen_) return;
  std::unique_lock lock(state_.mutex);
  if (tasks_.pending() || communicator_->aborted()) return;
  const auto pause = kPause * communicator_->rounds().ranks_per_cpu();
  progress->unlock();
  aside_ = true;
  uint64_t now;
  while (aside_ && (now = callers_.load(std::memory_order_relaxed)) != callers_seen_) {
    callers_seen_ = now;
    recalled_.wait_for(lock, pause, [this] { return !aside_; });
  }
  aside_ = false;
  lock.unlock();
  progress->lock();
}

void ProgressLock::Recall() {
  if (!std::exchange(aside_, false)) return;
  recalled_.notify_one();
}

}  // namespace ringjax
