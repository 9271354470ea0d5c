// The communicators of this process by id, for compiled programs. A program carries the
// id in its attributes, and looks up the communicator that has this id now. All
// functions are safe from any thread.
#pragma once

#include <cstdint>
#include <memory>

#include "device/cuda_communicator.h"
#include "engine/communicator/communicator.h"
#include "engine/communicator/device_rendezvous.h"
#include "engine/communicator/overlap.h"

namespace ringjax {

// A communicator and the objects that belong to it.
struct Registered {
  std::shared_ptr<Communicator> communicator;
  std::shared_ptr<Overlap> overlap;
  CudaCommunicator::All devices;  // one per device of this process, none without CUDA
  std::shared_ptr<DeviceRendezvous> meeting;
};

// Adds an entry, or replaces the entry of this id.
void Register(int64_t id, Registered entry);
// Removes the entry of this id if its communicator is still `communicator`. The check
// and the removal are one step, because the recovery may close the communicator of an
// ended epoch while the program registers that of the next epoch under the same id.
void Unregister(int64_t id, const Communicator* communicator);
// Returns a copy of the entry, with null pointers if there is none.
Registered Find(int64_t id);
// Sets the device communicators of an entry, if it exists; an empty list removes them.
void SetDevices(int64_t id, CudaCommunicator::All devices);

// The failure hook runs on the thread that reports a handler's failure to XLA. Pass
// null for no hook.
using FailureHook = void (*)();
void SetFailureHook(FailureHook hook);

}  // namespace ringjax
