// DeviceRendezvous: combines the calls of all devices of a process into one call.
//
// A program over several devices makes each call once for each device. For the other
// ranks these calls are one call, with one agreement, one message and one outcome for
// the whole process. A tensor on several devices is cut into shards, or the devices
// hold copies of it. Each shard is sent once, in an order that is equal on all ranks
// and does not depend on the devices. XLA calls such an object a rendezvous, too.
//
// No device waits here. XLA runs a program with as many threads as it has devices, and
// collectives of XLA itself block these threads until all devices have arrived. If our
// calls also blocked the threads, the devices that are still to arrive might never get
// a thread. So Join only stores the part of a device. When the call has ended, `done`
// is called for each device on a thread of its own, which may continue with the program
// and may block.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "engine/communicator/communicator.h"

namespace ringjax {

// The part of one device in a call. The tensors and texts of `call` must stay valid
// until `done` is called.
struct Part {
  std::shared_ptr<Communicator> communicator;
  Call call;  // `tensors` are the device's shards; all else is equal on all devices
  int64_t device = 0;            // one of `devices`
  int64_t run = 0;               // id of the program's run, equal on all devices
  std::vector<int64_t> devices;  // all devices, in the same order in each part
  // shards[t * devices.size() + d] is the index of the shard of tensor t that
  // devices[d] holds. Devices with the same index hold equal data.
  std::vector<int64_t> shards;
  // Called once, with the status of the call. If it is ok, the buffers have the
  // results.
  std::function<void(const Status&)> done;
  // Runs the combined call, once, after the parts of all devices have arrived. If
  // `body` is empty, the communicator runs the call itself. If `wants_turn` is set,
  // `ticket` is a ticket that `body` must pass to RunInTurn with its first call.
  // Otherwise `ticket` is 0.
  std::function<Status(uint64_t ticket, const Call& call)> body;
  bool wants_turn = true;
};

// Thread-safe.
class DeviceRendezvous {
 public:
  DeviceRendezvous() = default;
  ~DeviceRendezvous();  // fails the parts that still wait for a device
  DeviceRendezvous(const DeviceRendezvous&) = delete;
  DeviceRendezvous& operator=(const DeviceRendezvous&) = delete;

  // Stores the part of one device. The k-th call of a device in a run belongs to the
  // k-th calls of the other devices, and the last of these parts starts the call. Does
  // not wait, unless the system can start no thread for the call. If Join fails or
  // throws, `done` is not called.
  Status Join(Part part);

  // Returns the devices that the oldest incomplete call waits for, such as "device 1 of
  // its own to come to allreduce 'x'", or "". For CallLog::set_missing_locally.
  std::string Missing() const;

 private:
  using Time = std::chrono::steady_clock::time_point;
  struct Group {
    std::vector<Part> parts;  // parts that have arrived; never empty in open_
    Time deadline;
    double seconds = 0;  // the timeout from which `deadline` was computed

    std::string Missing() const;
  };

  void Watch();
  Status GiveUp(const Group& late, std::string* what);

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::list<Group> open_;  // groups that wait for a device, oldest first
  std::deque<std::pair<int64_t, Status>>
      given_up_;              // the last 64 runs given up (GiveUp)
  Time alarm_ = Time::max();  // when Watch wakes up next
  bool stopping_ = false;
  std::thread watch_;  // runs Watch; started by the first Join
};

}  // namespace ringjax
