// EndedTasks: stores EagerRequest::keep of each operation that has ended, until a
// caller takes the pointer and releases its object.
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

// An EagerLane owns the object. Any thread may call Take and any. TaskQueue::Finish
// calls the other functions.
class EndedTasks {
 public:
  // `mutex`: LaneState::mutex.
  explicit EndedTasks(std::mutex& mutex) : mutex_(mutex) {}

  // Returns the stored pointers. The caller must release their objects.
  std::vector<void*> Take();
  // Returns whether Take may return a pointer. Needs no lock, so it is cheap.
  bool any() const { return has_ended_.load(std::memory_order_acquire); }

  // The caller of all following functions holds mutex_.
  void Reserve(size_t more) { ended_.reserve(ended_.size() + more); }  // before Add
  void Add(void* keep) { ended_.push_back(keep); }
  // Adds the pointer of a work whose memory a device may still use.
  void AddEnqueued(const std::shared_ptr<Work>& work, void* keep) {
    enqueued_.emplace_back(work, keep);
  }
  // Updates the result of any().
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
