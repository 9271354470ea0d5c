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
  // Receives the time that an operation took on the device. Called with mutex_ held.
  using ReportTime = std::function<void(Collective op, double seconds)>;

  InFlight(const cuda::Driver& driver, ReportTime report_time)
      : driver_(driver), report_time_(std::move(report_time)) {}
  ~InFlight();
  InFlight(const InFlight&) = delete;
  InFlight& operator=(const InFlight&) = delete;

  // Record the events before and after the work of one operation. One operation at a
  // time may be between Begin and End.
  Status Begin(cuda::Stream stream, Collective op, std::string title);
  Status End(cuda::Stream stream);
  // Removes the operation that Begin has added. Call Drop if End has failed.
  void Drop();

  struct Oldest {
    std::string title;
    double seconds;  // time since PollOldest first found that it had begun
  };
  // Removes operations that have ended. Returns the oldest remaining operation if the
  // device has begun it, and nullopt otherwise.
  std::optional<Oldest> PollOldest();
  bool empty();
  // Sets `Oldest::seconds` of the oldest operation back to zero.
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
  const ReportTime report_time_;
  std::mutex mutex_;
  std::deque<Operation> operations_;
  std::vector<cuda::Event> spare_;
};

}  // namespace ringjax
