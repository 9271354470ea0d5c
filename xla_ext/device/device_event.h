// Device events: points in the work of a stream that other streams can wait for and the
// host can query. The primary context of a device creates the events, and keeps CUDA's
// events for reuse. Other contexts cannot serve, because the memory and the streams of
// frameworks belong to the primary context.
//
// Safe from any thread. In a forked child the destructors and Free do nothing.
#pragma once

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "device/driver.h"
#include "engine/call/owner.h"

namespace ringjax::cuda {

class DeviceEvent;

// The primary context of one device, retained as long as this object lives.
class PrimaryContext : public std::enable_shared_from_this<PrimaryContext> {
 public:
  static Result<std::shared_ptr<PrimaryContext>> Open(int device);
  ~PrimaryContext();
  PrimaryContext(const PrimaryContext&) = delete;
  PrimaryContext& operator=(const PrimaryContext&) = delete;

  int device() const { return device_; }
  bool IsHere() const { return owner_.IsHere(); }
  const Driver& driver() const { return driver_; }

  // Returns an event that is recorded now on `stream`; null is the default stream.
  Result<std::shared_ptr<DeviceEvent>> Record(Stream stream);
  // Returns an event that is not recorded yet.
  Result<std::shared_ptr<DeviceEvent>> Make();

  // Allocates memory from the driver's pool, in the order of `stream`.
  Result<Pointer> Allocate(size_t bytes, Stream stream);
  // Frees memory once `stream` has passed the work that is enqueued there now.
  void Free(Pointer memory, Stream stream);

 private:
  friend class DeviceEvent;

  PrimaryContext(const Driver& driver, int device) : driver_(driver), device_(device) {}

  const Owner owner_;
  const Driver& driver_;
  const int device_;
  Context context_ = nullptr;
  std::mutex mutex_;  // guards spare_
  std::vector<Event> spare_;
};

// A CUDA event. The destructor returns the event to its primary context for reuse.
class DeviceEvent {
 public:
  DeviceEvent(std::shared_ptr<PrimaryContext> context, Event event)
      : primary_context_(std::move(context)), event_(event) {}
  ~DeviceEvent();
  DeviceEvent(const DeviceEvent&) = delete;
  DeviceEvent& operator=(const DeviceEvent&) = delete;

  const std::shared_ptr<PrimaryContext>& context() const { return primary_context_; }
  Event event() const { return event_; }
  // Returns whether the stream has reached the event or has failed for good (MayRun).
  bool Passed() const;
  // Makes later work of `stream` wait for the event.
  Status Delay(Stream stream) const;

 private:
  const std::shared_ptr<PrimaryContext> primary_context_;
  const Event event_;
};

}  // namespace ringjax::cuda
