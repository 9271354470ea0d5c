// ProgressLock: the lock whose holder does the work of an eager lane
// (progress_engine.h), and the rules for which thread takes it.
//
// The holder is the thread of the lane, or a caller that waits for its own operation.
// If a caller did not do the work itself, it would wake the lane's thread and be woken
// by that thread, which takes longer than most short operations. So while callers that
// wait arrive one after the other, the lane's thread leaves the lock to them, and only
// checks from time to time whether they still arrive.
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

// Owned by an EagerLane. A thread that takes both locks takes the progress lock first
// and LaneState::mutex second.
class ProgressLock {
 public:
  ProgressLock(LaneState& state, const TaskQueue& tasks);

  // Takes the progress lock. Called by the lane's own thread.
  std::unique_lock<std::mutex> Lock() { return std::unique_lock(mutex_); }
  // Called by the lane's own thread. If callers have arrived since the last StandAside
  // and no operation is pending, leaves the progress lock to callers until no new
  // caller arrives, or until Recall.
  void StandAside(std::unique_lock<std::mutex>* progress);

  // A thread that waits for its operation calls CountCaller and then TryLock. If
  // another thread has the progress lock, TryLock returns a lock that owns no mutex.
  void CountCaller() { callers_.fetch_add(1, std::memory_order_relaxed); }
  std::unique_lock<std::mutex> TryLock() {
    return std::unique_lock(mutex_, std::try_to_lock);
  }

  // Makes the lane's own thread take the progress lock again, because there is work
  // that no caller will do. The calling thread holds LaneState::mutex.
  void Recall();

 private:
  LaneState& state_;
  const std::shared_ptr<Communicator>& communicator_;  // the lane's current epoch
  const TaskQueue& tasks_;

  std::mutex mutex_;  // the progress lock itself
  // How often CountCaller was called. Relaxed order suffices: a stale value only
  // changes when StandAside leaves the lock, and Recall, under a mutex, never misses
  // work.
  std::atomic<uint64_t> callers_{0};
  uint64_t callers_seen_ = 0;  // callers_ when StandAside last read it
  // Whether the lane's own thread is in StandAside. Guarded by LaneState::mutex.
  bool aside_ = false;
  std::condition_variable recalled_;
};

}  // namespace ringjax
