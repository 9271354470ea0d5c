// Ticket: what a submission will have come to. The lane's thread ends it once; any
// thread may ask, or wait.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "base/dtype.h"
#include "base/status.h"

namespace ringjax {

// A point in the work of a stream on some device.
class DevicePoint {
 public:
  virtual ~DevicePoint() = default;
  virtual int device() const = 0;
  // Whether the device has come there; asks, never waits.
  virtual bool passed() const = 0;
  // Whether what was done up to it is void; it will pass all the same, in the end.
  virtual bool failed() const = 0;
  // What is enqueued on `stream` from now on comes after it. Not ok: what was done up
  // to it is void.
  virtual Status Delay(uint64_t stream) = 0;
};
using DevicePointPtr = std::shared_ptr<DevicePoint>;

// Memory that the core made, for results whose size only the ranks together know.
struct Output {
  std::shared_ptr<void> memory;
  DType dtype = DType::kF32;
  std::vector<int64_t> dims;
  std::vector<int64_t> received;  // rows from each rank
};

// Where the threads that wait for tickets of one lane do so.
struct Gate {
  std::mutex mutex;
  std::condition_variable ended;
  double spin_seconds = 0;

  // While it lives, this thread does the lane's work, and nobody else will.
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

class Ticket {
 public:
  explicit Ticket(std::shared_ptr<Gate> gate) : gate_(std::move(gate)) {}

  bool done() const { return done_.load(std::memory_order_acquire); }
  // How it ended. kCancelled if this process was interrupted first: it goes on then.
  // kFailedPrecondition: this is a signal handler's, and its thread does the work.
  Status Wait();

  // Whether the device has done its part as well, if there is one.
  bool passed() const { return done() && (!end_ || end_->passed()); }
  // Whether nobody needs to wait for more than that.
  bool settled() const { return done() && (!end_ || end_->passed() || end_->failed()); }
  // Once done, for tensors on a device: their results are there for what is enqueued on
  // `stream` from now on.
  Status Follow(uint64_t stream);
  // Whether the stream that submitted has been told to wait: its memory may be reused.
  bool followed() const { return followed_.load(std::memory_order_acquire); }
  uint64_t stream() const { return stream_; }

  // Once done:
  const Status& status() const { return status_; }
  const std::vector<Output>& outputs() const { return outputs_; }
  int last_joined() const { return last_joined_; }           // of Join, rank in the set
  int device() const { return end_ ? end_->device() : -1; }  // -1: the host

 private:
  friend class EagerLane;

  const std::shared_ptr<Gate> gate_;
  uint64_t stream_ = 0;  // of the submission
  // Written before `done_`, by the lane's thread.
  Status status_;
  std::vector<Output> outputs_;
  std::shared_ptr<DevicePoint> end_;  // null: nothing is left to do on a device
  int last_joined_ = -1;
  std::atomic<bool> followed_{false};
  std::atomic<bool> done_{false};
};

}  // namespace ringjax
