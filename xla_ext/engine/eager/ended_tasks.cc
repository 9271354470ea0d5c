// The order of the works that a device still uses. See ended_tasks.h.
#include "engine/eager/ended_tasks.h"

namespace ringjax {

std::vector<void*> EndedTasks::Take() {
  std::lock_guard lock(mutex_);
  while (!enqueued_.empty()) {
    const Work& first = *enqueued_.front().first;
    if (!first.followed() && !first.passed()) break;
    ended_.push_back(enqueued_.front().second);
    enqueued_.pop_front();
  }
  has_ended_.store(!enqueued_.empty(), std::memory_order_relaxed);
  return std::exchange(ended_, {});
}

}  // namespace ringjax
