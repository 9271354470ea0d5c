// Flights: NCCL operations that a stream has been given and has not finished.
//
// A pair of events around each tells an operation that is waiting for its turn on the
// device, which may take as long as it likes, from one that has begun and does not end,
// and tells how long it took there.
// Not thread-safe by itself but for its own lock; the context must be current.
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

class Flights {
 public:
  // Hears how many seconds an operation has taken on the device, once that is seen.
  using Took = std::function<void(Collective op, double seconds)>;

  Flights(const cuda::Driver& driver, Took took)
      : driver_(driver), took_(std::move(took)) {}
  ~Flights();
  Flights(const Flights&) = delete;
  Flights& operator=(const Flights&) = delete;

  Status Begin(cuda::Stream stream, Collective op, std::string title);
  Status End(cuda::Stream stream);
  // After an error between Begin and End.
  void Drop();

  struct Oldest {
    std::string title;
    double seconds;  // since it was seen to have begun
  };
  // Forgets what has finished; tells about the oldest that runs, if any does.
  std::optional<Oldest> Look();
  bool empty();
  // The oldest starts its clock again.
  void Restart();

 private:
  struct Flight {
    Collective op = Collective::kBarrier;
    std::string title;
    cuda::Event begun = nullptr, ended = nullptr;
    bool closed = false;  // End was called
    std::optional<std::chrono::steady_clock::time_point> since;
  };

  void Land();  // the oldest has ended

  const cuda::Driver& driver_;
  const Took took_;
  std::mutex mutex_;
  std::deque<Flight> flights_;
  std::vector<cuda::Event> spare_;
};

}  // namespace ringjax
