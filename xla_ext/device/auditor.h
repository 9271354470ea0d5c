// The auditor: a thread that finds out whether all ranks issued the same call.
//
// On a GPU a call is only enqueued, and ranks that enqueue different ones would wait
// for each other for ever without a word. Asking the others first would make every host
// wait for the slowest one, so the question is asked beside the work: over links of the
// host's own, in the order of the calls, some microseconds after they were enqueued.
// It also finds out who is late, as on the CPU.
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

// A call without its buffers: what ranks compare, kept for as long as it may recur.
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
  Status fits;  // whether this rank can do it

 private:
  std::string name, names, partition;
};

class Auditor {
 public:
  // `on_failure` is told once, on the auditor's thread, what went wrong.
  Auditor(std::shared_ptr<Communicator> control,
          std::function<void(const Status&)> on_failure);
  // Waits for the comparison that is going on: abort the communicator first.
  ~Auditor();

  void Add(std::shared_ptr<const CallRecord> call);
  // Whether all calls so far were compared, after at most so many seconds.
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
