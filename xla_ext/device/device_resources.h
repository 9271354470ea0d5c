// The resources of a device communicator on its device: the primary context, two
// streams, a few words and a workspace of device memory, the kernels, and the events
// that mark the in-flight operations.
#pragma once

#include <cstddef>
#include <memory>

#include "device/driver.h"
#include "device/in_flight.h"
#include "device/kernels.h"

namespace ringjax {

// Owned by a CudaCommunicator. Between Open and Release any thread may use the
// accessors; the caller of Scratch or Delay holds turn_mutex_ of the CudaCommunicator.
// The context of the device must be current, except in Open.
class DeviceResources {
 public:
  // `ordinal` is the CUDA ordinal of the device.
  DeviceResources(const cuda::Driver& driver, int ordinal)
      : driver_(driver), ordinal_(ordinal) {}
  DeviceResources(const DeviceResources&) = delete;
  DeviceResources& operator=(const DeviceResources&) = delete;

  // Makes the resources; needs no other rank. `report_time` receives operation times.
  Status Open(InFlight::ReportTime report_time);
  // Waits, for a limited time, until the device has ended all work of the communicator.
  // Returns whether all work has ended.
  bool AwaitIdle() const;
  // Releases everything if the device is `idle`; otherwise leaks all resources, because
  // work on the device may still use them. Afterwards in_flight() and the streams are
  // null, and there are no kernels and no words.
  void Release(bool idle);

  const cuda::Driver& driver() const { return driver_; }
  cuda::Context context() const { return context_; }  // null before Open
  cuda::Kernels& kernels() const { return *kernels_; }
  InFlight* in_flight() const { return in_flight_.get(); }
  cuda::Stream comm_stream() const { return comm_stream_; }
  cuda::Stream side_stream() const { return side_stream_; }
  cuda::Pointer poison_word() const { return words_; }
  cuda::Pointer barrier_word() const { return words_ + sizeof(unsigned); }

  Result<cuda::Pointer> Scratch(size_t bytes);
  // Makes later work of `stream` wait for the work on the communication stream.
  void Delay(cuda::Stream stream) const;

 private:
  Status OpenDevice();

  const cuda::Driver& driver_;
  const int ordinal_;
  cuda::Context context_ = nullptr;
  std::unique_ptr<cuda::Kernels> kernels_;
  cuda::Stream comm_stream_ = nullptr, side_stream_ = nullptr;
  cuda::Event fence_ = nullptr;
  // A few words of device memory. Word 0 is the poison word; barriers use word 1.
  cuda::Pointer words_ = 0;
  std::unique_ptr<InFlight> in_flight_;
  cuda::Pointer scratch_ = 0;
  size_t scratch_bytes_ = 0;
};

}  // namespace ringjax
