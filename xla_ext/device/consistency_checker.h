// The consistency checker: a thread that compares the CUDA calls of all ranks.
//
// A call on a device is only enqueued, and ranks that enqueue different calls would
// wait for each other forever, without an error. An agreement before each call would
// make every host wait for the slowest one. So the calls are compared while the devices
// work: over the control communicator, in the order of the calls, some microseconds
// after they were enqueued. The comparison also detects ranks that make a call late.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "engine/communicator/communicator.h"

namespace ringjax {

// The properties of a call that the ranks compare: all but its buffers. Owns the
// strings that `call` refers to. The communicator reuses the record if the call is
// repeated.
struct CallRecord {
  explicit CallRecord(const Call& from)
      : call(from), name(from.name), names(from.names), partition(from.partition) {
    call.name = name;
    call.names = names;
    call.partition = partition;
  }
  CallRecord(const CallRecord&) = delete;
  CallRecord& operator=(const CallRecord&) = delete;

  Call call;
  Status fits;  // ok: this rank can do its part

 private:
  std::string name, names, partition;
};

// Compares the added calls in order until a comparison fails. Safe from any thread.
class ConsistencyChecker {
 public:
  // `on_failure` is called at most once, on the thread of the checker.
  ConsistencyChecker(std::shared_ptr<Communicator> control,
                     std::function<void(const Status&)> on_failure);
  // Waits for the comparison that is running. Abort the control communicator first:
  // otherwise the comparison may wait for a late rank.
  ~ConsistencyChecker();

  // Queues a call for comparison. Does nothing after a comparison has failed.
  void Add(std::shared_ptr<const CallRecord> call);
  // Waits up to `seconds` seconds until all queued calls are compared. Returns true if
  // all calls are compared and no comparison has failed.
  bool Drain(double seconds);

 private:
  void Work();

  const std::shared_ptr<Communicator> control_;
  const std::function<void(const Status&)> on_failure_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<const CallRecord>> queue_;  // the front is being compared
  bool stopping_ = false, failed_ = false;
  std::thread thread_;
};

}  // namespace ringjax
