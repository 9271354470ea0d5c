// See consistency_checker.h.
#include "device/consistency_checker.h"

#include <chrono>

namespace ringjax {

ConsistencyChecker::ConsistencyChecker(std::shared_ptr<Communicator> control,
                                       std::function<void(const Status&)> on_failure)
    : control_(std::move(control)),
      on_failure_(std::move(on_failure)),
      thread_([this] { Work(); }) {}

ConsistencyChecker::~ConsistencyChecker() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void ConsistencyChecker::Add(std::shared_ptr<const CallRecord> call) {
  {
    std::lock_guard lock(mutex_);
    if (failed_ || stopping_) return;
    queue_.push_back(std::move(call));
  }
  changed_.notify_all();
}

bool ConsistencyChecker::Drain(double seconds) {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, std::chrono::duration<double>(seconds),
                    [this] { return queue_.empty() || failed_; });
  return queue_.empty() && !failed_;
}

void ConsistencyChecker::Work() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
    if (stopping_) return;
    const std::shared_ptr<const CallRecord> next = queue_.front();
    lock.unlock();
    bool refused = false;
    const Status same = control_->Compare(next->call, next->fits, &refused);
    // If all ranks have refused the call, none has enqueued it, and the epoch
    // continues.
    const bool over = !same.ok() && !refused;
    if (over) on_failure_(same);
    lock.lock();
    queue_.pop_front();
    if (over) {
      failed_ = true;
      queue_.clear();
    }
    changed_.notify_all();
    if (failed_) return;
  }
}

}  // namespace ringjax
