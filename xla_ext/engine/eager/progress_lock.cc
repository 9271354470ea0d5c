// Decides when the lane's own thread leaves the progress lock to callers. See
// progress_lock.h.
#include "engine/eager/progress_lock.h"

#include <chrono>
#include <utility>

namespace ringjax {
namespace {

// After this time without callers, the lane's own thread takes the progress lock again.
// Until then, a round that a peer begins waits for this rank. That delays no operation,
// because every operation needs a submission of this rank, which has submitted none.
constexpr auto kPause = std::chrono::milliseconds(5);

}  // namespace

ProgressLock::ProgressLock(LaneState& state, const TaskQueue& tasks)
    : state_(state), communicator_(state.communicator), tasks_(tasks) {}

void ProgressLock::StandAside(std::unique_lock<std::mutex>* progress) {
  if (callers_.load(std::memory_order_relaxed) == callers_seen_) return;
  std::unique_lock lock(state_.mutex);
  if (tasks_.pending() || communicator_->aborted()) return;
  progress->unlock();
  aside_ = true;
  uint64_t now;
  while (aside_ && (now = callers_.load(std::memory_order_relaxed)) != callers_seen_) {
    callers_seen_ = now;
    recalled_.wait_for(lock, kPause, [this] { return !aside_; });
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
