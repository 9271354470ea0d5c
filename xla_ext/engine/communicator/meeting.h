// Meeting: a program over several devices of this process calls once for each of them,
// and all together are one call to the other ranks.
//
// One agreement, one message, one verdict a process, whatever devices it has. A tensor
// that lies on several devices is cut into shards, or they have copies of it; each
// shard travels once, in the same order on all ranks, whoever of the devices has it.
//
// Nobody waits here. Devices of a program have as many threads as there are devices,
// and wait in collectives of the framework, which need all of them: were more than one
// to wait in a call of ours, too, the devices that they wait for might never get a
// thread. So a device hands in its part and goes on when `done` is called, each on a
// thread that nobody else needs: it may go on with the program there, and wait.
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

// What one device has of a call. Memory and texts live until `done`.
struct Part {
  std::shared_ptr<Communicator> communicator;
  Call call;  // its shard of each tensor, the same on all devices but for memory
  int64_t device = 0;            // of `devices`
  int64_t run = 0;               // of the program, the same for all devices
  std::vector<int64_t> devices;  // all that take part, in an order that they share
  // For each tensor, for each device in order: which shard of the tensor it has, from
  // 0. Devices with one number have equal data.
  std::vector<int64_t> shards;
  std::function<void(const Status&)> done;  // once; results are in place if it is ok
  // What is done, once, with the call of all; if empty, the communicator runs it. The
  // first of its own calls is in the turn of the ticket, if it wants one.
  std::function<Status(uint64_t ticket, const Call& call)> body;
  bool wants_turn = true;
};

class Meeting {
 public:
  Meeting() = default;
  ~Meeting();  // whoever still waits for a device is told
  Meeting(const Meeting&) = delete;
  Meeting& operator=(const Meeting&) = delete;

  // Calls of one run meet in their order: the k-th of a device with the k-th of the
  // others. Not ok: `done` is not called. The last device to come starts the call.
  Status Join(Part part);

  // "device 1 of its own to come to allreduce 'x'", of the call that has waited longest
  // for a device; empty: none does. For Communicator::set_missing.
  std::string Missing() const;

 private:
  using Time = std::chrono::steady_clock::time_point;
  struct Group {
    std::vector<Part> parts;
    Time deadline;
    double seconds = 0;  // until there

    std::string Missing() const;
  };

  void Watch();
  Status Miss(const Group& late, std::string* what);

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::list<Group> open_;  // by age: a device is still to come
  std::deque<std::pair<int64_t, Status>>
      lost_;                  // runs that were given up, the last few
  Time alarm_ = Time::max();  // of the thread
  bool stopping_ = false;
  std::thread watch_;  // started with the first call
};

}  // namespace ringjax
