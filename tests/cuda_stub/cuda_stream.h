// The asynchronous half of the CUDA stub: streams, each a thread with a queue, and
// events. libcuda_stub.cc and cuda_queues.cc have the functions of the driver.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>

#include "device/driver.h"
#include "stub_knobs.h"

namespace ringjax::cuda {

// Whether this thread runs a host function or a kernel, where CUDA forbids its calls.
inline thread_local bool t_on_stream = false;

struct ContextTag {
  Device device = 0;
  std::atomic<int> retained = 0;
  std::shared_ptr<StreamTag> default_stream;  // made at its first use
};

// One cuEventRecord, which is done once the stream has reached it.
class Record {
 public:
  void Finish() {
    std::lock_guard lock(mutex_);
    done_ = true;
    when_ = std::chrono::steady_clock::now();
    changed_.notify_all();
  }

  void Wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return done_; });
  }

  bool done() {
    std::lock_guard lock(mutex_);
    return done_;
  }

  std::chrono::steady_clock::time_point when() {
    std::lock_guard lock(mutex_);
    return when_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
  std::chrono::steady_clock::time_point when_;
};

struct EventTag {
  Context context = nullptr;
  unsigned flags = 0;
  std::shared_ptr<Record> last;  // null: never recorded
};

struct StreamTag : std::enable_shared_from_this<StreamTag> {
 public:
  explicit StreamTag(Context owner) : context(owner) {}

  const Context context;

  // `work` runs after everything that was pushed before.
  void Push(std::function<void()> work) {
    std::lock_guard lock(mutex_);
    if (!started_) {
      started_ = true;
      stub::StartThread([self = shared_from_this()] { self->Work(); });
    }
    queue_.push_back(std::move(work));
    pushed_++;
    changed_.notify_all();
  }

  bool Idle() {
    std::lock_guard lock(mutex_);
    return finished_ == pushed_;
  }

  // Returns the number of all pushed functions.
  unsigned long long Pushed() {
    std::lock_guard lock(mutex_);
    return pushed_;
  }

  // Waits for all functions that are pushed before this call.
  void Drain() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&, until = pushed_] { return finished_ >= until; });
  }

  // Ends the thread once the queue is empty. As in CUDA, does not wait for that.
  void Close() {
    std::lock_guard lock(mutex_);
    closed_ = true;
    changed_.notify_all();
  }

 private:
  void Work() {
    t_on_stream = true;
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [&] { return closed_ || !queue_.empty(); });
      if (queue_.empty()) return;
      std::function<void()> work = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      work();
      work = nullptr;
      lock.lock();
      finished_++;
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  bool started_ = false, closed_ = false;
  unsigned long long pushed_ = 0, finished_ = 0;
};

}  // namespace ringjax::cuda
