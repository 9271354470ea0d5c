// ProgressLock: the lock whose holder does the work of an eager lane
// (progress_engine.h), and which thread takes it.
//
// The holder is the thread of the lane, or a caller that waits for its own operation.
// To wake a thread and to be woken by it takes longer than most short operations. So
// while such callers come one after the other, the thread leaves the lock to them and
// only checks from time to time whether they still come.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>

#include "engine/communicator/communicator.h"
#include "engine/eager/lane_state.h"
#include "engine/eager/task_queue.h"

namespace ringjax {

// Owned by EagerLane.
class ProgressLock {
 public:
  ProgressLock(LaneState& state, const TaskQueue& tasks);

  // By the lane's own thread. The progress lock is acquired before LaneState::mutex.
  std::unique_lock<std::mutex> Lock() { return std::unique_lock(mutex_); }
  // If callers have come lately and no operation is pending, leaves the progress lock
  // to callers until no new one comes.
  void StandAside(std::unique_lock<std::mutex>* progress);

  // For a caller that waits: first CountCaller, then TryLock, which returns a lock that
  // owns nothing if another thread is the holder.
  void CountCaller() { callers_.fetch_add(1, std::memory_order_relaxed); }
  std::unique_lock<std::mutex> TryLock() {
    return std::unique_lock(mutex_, std::try_to_lock);
  }

  // By any thread, with LaneState::mutex held. Makes the lane's own thread take the
  // progress lock again, because there is work that no caller will do.
  void Recall();

 private:
  LaneState& state_;
  const std::shared_ptr<Communicator>& communicator_;  // the lane's current epoch
  const TaskQueue& tasks_;

  std::mutex mutex_;  // the progress lock itself
  // How many callers have waited: so far, and when StandAside last looked.
  std::atomic<uint64_t> callers_{0};
  uint64_t callers_seen_ = 0;

  // Guarded by LaneState::mutex: the lane's own thread leaves the progress lock free.
  bool aside_ = false;
  std::condition_variable recalled_;
};

}  // namespace ringjax
