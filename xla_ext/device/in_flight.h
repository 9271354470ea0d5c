// In-flight operations: NCCL operations that were enqueued and have not ended.
//
// A pair of events around each operation distinguishes an operation that waits for
// earlier work on the device, which may take any time, from one that has begun and does
// not end. The events also give the time of the operation on the device. Safe from any
// thread; the CUDA context of the device must be current.
#pragma once

#include <chrono>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "collective/schedule.h"
#include "device/driver.h"

namespace ringjax {

class InFlight {
 public:
  // Receives the time of an operation on the device. Called with mutex_ held.
  using Took = std::function<void(Collective op, double seconds)>;

  InFlight(const cuda::Driver& driver, Took took)
      : driver_(driver), took_(std::move(took)) {}
  ~InFlight();
  InFlight(const InFlight&) = delete;
  InFlight& operator=(const InFlight&) = delete;

  // Record the events before and after the work of one operation. One operation at a
  // time may be between Begin and End.
  Status Begin(cuda::Stream stream, Collective op, std::string title);
  Status End(cuda::Stream stream);
  // Removes the operation that has begun, if End has failed.
  void Drop();

  struct Oldest {
    std::string title;
    double seconds;  // time since Look first found that the operation had begun
  };
  // Removes operations that have ended. Returns the oldest remaining one if it has
  // begun on the device.
  std::optional<Oldest> Look();
  bool empty();
  // Restarts the time of the oldest operation, `Oldest::seconds`.
  void Restart();

 private:
  struct Operation {
    Collective op = Collective::kBarrier;
    std::string title;
    cuda::Event begun = nullptr, ended = nullptr;
    bool closed = false;  // End was called
    std::optional<std::chrono::steady_clock::time_point> since;
  };

  void Retire();  // removes the oldest operation, which has ended

  const cuda::Driver& driver_;
  const Took took_;
  std::mutex mutex_;
  std::deque<Operation> operations_;
  std::vector<cuda::Event> spare_;
};

}  // namespace ringjax
