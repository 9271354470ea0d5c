// ProgressLock: the lock whose holder does the work of an eager lane
// (progress_engine.h), and the rules for which thread takes it.
//
// The holder is the thread of the lane, or a caller that waits for its own operation. A
// caller that did not do the work itself would wake the lane's thread and be woken by
// it, which takes longer than most short operations. So while callers that wait arrive
// one after the other, the lane's thread leaves the lock to them, and only checks from
// time to time whether they still arrive.
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

// An EagerLane owns the object. The progress lock comes before LaneState::mutex in the
// lock order.
class ProgressLock {
 public:
  ProgressLock(LaneState& state, const TaskQueue& tasks);

  // For the lane's own thread.
  std::unique_lock<std::mutex> Lock() { return std::unique_lock(mutex_); }
  // For the lane's own thread. If callers have arrived since the last time and no
  // operation is pending, leaves the progress lock to callers until no new caller
  // arrives.
  void StandAside(std::unique_lock<std::mutex>* progress);

  // For a caller that waits. It first calls CountCaller, and then TryLock, which
  // returns an empty lock if another thread is the holder.
  void CountCaller() { callers_.fetch_add(1, std::memory_order_relaxed); }
  std::unique_lock<std::mutex> TryLock() {
    return std::unique_lock(mutex_, std::try_to_lock);
  }

  // For any thread that holds LaneState::mutex. Makes the lane's own thread take the
  // progress lock again, because there is work that no caller will do.
  void Recall();

 private:
  LaneState& state_;
  const std::shared_ptr<Communicator>& communicator_;  // the lane's current epoch
  const TaskQueue& tasks_;

  std::mutex mutex_;  // the progress lock itself
  // Number of calls of CountCaller. Relaxed, because a stale number only changes when
  // the lane's thread stands aside; Recall, under a mutex, never misses work.
  std::atomic<uint64_t> callers_{0};
  uint64_t callers_seen_ = 0;  // callers_ when StandAside last read it
  // Whether the lane's own thread is in StandAside. Guarded by LaneState::mutex.
  bool aside_ = false;
  std::condition_variable recalled_;
};

}  // namespace ringjax
