// Milestones: points in the work of a stream, which other streams can wait for and the
// host can ask about; and the device they belong to, which keeps their events for
// reuse. For memory and streams of frameworks, which ringjax never made.
//
// Safe from any thread. What is left of them in a forked child does nothing.
#pragma once

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "device/driver.h"
#include "engine/call/owner.h"

namespace ringjax::cuda {

class Milestone;

// The primary context of one device, held for as long as somebody needs it.
class Ground : public std::enable_shared_from_this<Ground> {
 public:
  static Result<std::shared_ptr<Ground>> Open(int device);
  ~Ground();
  Ground(const Ground&) = delete;
  Ground& operator=(const Ground&) = delete;

  int device() const { return device_; }
  bool IsHere() const { return owner_.IsHere(); }
  const Driver& driver() const { return driver_; }

  // Now, on a stream of this device; 0 is its default stream.
  Result<std::shared_ptr<Milestone>> Record(Stream stream);
  // One that is not recorded yet.
  Result<std::shared_ptr<Milestone>> Make();

  // Memory of the driver's pool, in the order of `stream`.
  Result<Pointer> Allocate(size_t bytes, Stream stream);
  void Free(Pointer memory, Stream stream);

 private:
  friend class Milestone;

  Ground(const Driver& driver, int device) : driver_(driver), device_(device) {}

  const Owner owner_;
  const Driver& driver_;
  const int device_;
  Context context_ = nullptr;
  std::mutex mutex_;  // guards spare_
  std::vector<Event> spare_;
};

class Milestone {
 public:
  Milestone(std::shared_ptr<Ground> ground, Event event)
      : ground_(std::move(ground)), event_(event) {}
  ~Milestone();
  Milestone(const Milestone&) = delete;
  Milestone& operator=(const Milestone&) = delete;

  const std::shared_ptr<Ground>& ground() const { return ground_; }
  Event event() const { return event_; }
  // Whether the stream has come that far; also true of a device that answers nothing.
  bool Passed() const;
  // What is enqueued on `stream` from now on comes after this.
  Status Delay(Stream stream) const;

 private:
  const std::shared_ptr<Ground> ground_;
  const Event event_;
};

}  // namespace ringjax::cuda
