// Work: the handle with which any thread polls or waits for the outcome of a submitted
// operation. PyTorch's c10d uses the name Work; Horovod says handle. The thread that
// holds the progress lock of the eager lane completes each Work once.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "base/dtype.h"
#include "base/status.h"
#include "engine/call/descriptor.h"

namespace ringjax {

// A point in the work of a device stream, like a CUDA event.
class DevicePoint {
 public:
  virtual ~DevicePoint() = default;
  virtual int device() const = 0;
  // Whether the device has reached the point. Does not wait.
  virtual bool passed() const = 0;
  // Whether the work before the point has failed. The device still reaches the point.
  virtual bool failed() const = 0;
  // Makes work that is enqueued on `stream` later wait for the point. Fails if
  // failed().
  virtual Status Delay(uint64_t stream) = 0;
};
using DevicePointPtr = std::shared_ptr<DevicePoint>;

// A result in memory that the core has allocated, because the size of the result was
// known only after the negotiation.
struct Output {
  std::shared_ptr<void> memory;
  DType dtype = DType::kF32;
  Dims dims;
  std::vector<int64_t> received;  // rows from each rank
};

// The mutex and condition variable on which threads wait for operations of one lane.
struct Gate {
  std::mutex mutex;
  std::condition_variable ended;
  double spin_seconds = 0;  // how long a thread yields before it sleeps

  // While a Driver exists, the thread that created it counts as a caller that runs the
  // lane (EagerLane::Drive).
  class Driver {
   public:
    explicit Driver(const Gate* gate) { driven = gate; }
    ~Driver() { driven = nullptr; }
    Driver(const Driver&) = delete;
    Driver& operator=(const Driver&) = delete;
  };
  static bool IsDriving() { return driven != nullptr; }
  bool IsDriver() const { return driven == this; }

 private:
  static inline thread_local const Gate* driven = nullptr;
};

class Work {
 public:
  // `stream`: the stream of the submitter (EagerRequest::stream).
  explicit Work(std::shared_ptr<Gate> gate, uint64_t stream = 0)
      : gate_(std::move(gate)), stream_(stream) {}

  bool done() const { return done_.load(std::memory_order_acquire); }
  // Waits for the outcome. Fails with kCancelled if a signal interrupted this process;
  // the operation continues. Fails with kFailedPrecondition in a signal handler that
  // has interrupted a Driver, because only its own thread could complete the operation.
  Status Wait();

  // Whether the operation has ended, also on the device if a device runs it.
  bool passed() const { return done() && (!end_ || end_->passed()); }
  // Whether the work has ended or failed, so that there is nothing left to wait for.
  bool settled() const { return done() && (!end_ || end_->passed() || end_->failed()); }
  // Makes later work of `stream` wait for the results. Must not be called before
  // done().
  Status Follow(uint64_t stream);
  // Whether the stream of the submitter already waits for the end of the work, so that
  // later work of that stream may reuse the memory of the operation.
  bool followed() const { return followed_.load(std::memory_order_acquire); }
  uint64_t stream() const { return stream_; }

  // Once done:
  const Status& status() const { return status_; }
  const std::vector<Output>& outputs() const { return outputs_; }
  int last_joined() const { return last_joined_; }           // Join: rank in the set
  int device() const { return end_ ? end_->device() : -1; }  // -1: the host

  // The holder of the progress lock, which also holds Gate::mutex, calls one of these
  // two functions once. If `outputs` is not null, moves from `*outputs`. `end` is null
  // without a device.
  void Complete(const Status& status, const DevicePointPtr& end,
                std::vector<Output>* outputs) {
    status_ = status;
    end_ = end;
    if (outputs != nullptr) outputs_ = std::move(*outputs);
    done_.store(true, std::memory_order_release);
  }
  void CompleteJoin(const Status& status, int last_joined) {
    status_ = status;
    last_joined_ = last_joined;
    done_.store(true, std::memory_order_release);
  }

 private:
  const std::shared_ptr<Gate> gate_;
  const uint64_t stream_;
  // The holder writes these members before its release store to done_. Other threads
  // read them only after the acquire load in done() has returned true.
  Status status_;
  std::vector<Output> outputs_;
  std::shared_ptr<DevicePoint> end_;  // null without a device
  int last_joined_ = -1;
  std::atomic<bool> followed_{false};
  std::atomic<bool> done_{false};
};

}  // namespace ringjax
