// EndedTasks: after an operation of an eager lane has ended, stores the pointer
// EagerRequest::keep of the operation, until a caller takes it and releases the object.
#pragma once

#include <atomic>
#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "engine/eager/work.h"

namespace ringjax {

// Owned by EagerLane. Any thread may call Take and any; TaskQueue::Finish calls the
// rest.
class EndedTasks {
 public:
  // `mutex`: LaneState::mutex.
  explicit EndedTasks(std::mutex& mutex) : mutex_(mutex) {}

  // Returns EagerRequest::keep of each operation that has ended. The caller releases
  // it.
  std::vector<void*> Take();
  // Whether Take may return something.
  bool any() const { return has_ended_.load(std::memory_order_acquire); }

  // All with mutex_ held. Reserve: makes room for `more` calls of Add.
  void Reserve(size_t more) { ended_.reserve(ended_.size() + more); }
  void Add(void* keep) { ended_.push_back(keep); }
  // For a work whose memory a device may still use.
  void AddEnqueued(const std::shared_ptr<Work>& work, void* keep) {
    enqueued_.emplace_back(work, keep);
  }
  // Makes any() return true if anything was added.
  void Publish() {
    has_ended_.store(!ended_.empty() || !enqueued_.empty(), std::memory_order_release);
  }

 private:
  std::mutex& mutex_;  // guards all below
  std::vector<void*> ended_;
  // Works whose memory a device may still use, with their EagerRequest::keep, in the
  // order of the device's work.
  std::deque<std::pair<std::shared_ptr<Work>, void*>> enqueued_;
  std::atomic<bool> has_ended_{false};
};

}  // namespace ringjax
