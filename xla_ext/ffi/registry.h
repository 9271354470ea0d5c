// Communicators by id, for compiled programs: a program carries the id in its
// attributes and finds here what is alive under it now. The only process-wide state of
// the native side.
#pragma once

#include <cstdint>
#include <memory>

#include "device/cuda_communicator.h"
#include "engine/communicator/communicator.h"
#include "engine/communicator/meeting.h"
#include "engine/communicator/overlap.h"

namespace ringjax {

struct Registered {
  std::shared_ptr<Communicator> communicator;
  std::shared_ptr<Overlap> overlap;
  CudaCommunicator::All devices;  // of this process; none without CUDA
  std::shared_ptr<Meeting> meeting;
};

// Replaces what had this id.
void Register(int64_t id, Registered entry);
void Unregister(int64_t id);
// Empty pointers if there is none.
Registered Find(int64_t id);
// Gives the communicator that has this id, if there is one, a device half or takes it.
void SetDevices(int64_t id, CudaCommunicator::All devices);

// Called after a handler failed, on the failing thread; may be null.
using FailureHook = void (*)();
void SetFailureHook(FailureHook hook);

}  // namespace ringjax
