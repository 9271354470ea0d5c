// Flights: NCCL operations that a stream has been given and has not finished.
//
// A pair of events around each tells an operation that is waiting for its turn on the
// device, which may take as long as it likes, from one that has begun and does not end.
// Not thread-safe by itself but for its own lock; the context must be current.
#pragma once

#include <chrono>
#include <deque>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "device/driver.h"

namespace ringjax {

class Flights {
 public:
  explicit Flights(const cuda::Driver& driver) : driver_(driver) {}
  ~Flights();
  Flights(const Flights&) = delete;
  Flights& operator=(const Flights&) = delete;

  Status Begin(cuda::Stream stream, std::string title);
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
    std::string title;
    cuda::Event begun = nullptr, ended = nullptr;
    bool closed = false;  // End was called
    std::optional<std::chrono::steady_clock::time_point> since;
  };

  const cuda::Driver& driver_;
  std::mutex mutex_;
  std::deque<Flight> flights_;
  std::vector<cuda::Event> spare_;
};

}  // namespace ringjax
