// Task: an operation of this rank from EagerLane::Submit to TaskQueue::Finish. The
// negotiation uses only its base class Submission.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "base/status.h"
#include "engine/call/waiter.h"
#include "engine/communicator/communicator.h"
#include "engine/eager/negotiation.h"
#include "engine/eager/submission.h"
#include "engine/eager/work.h"

namespace ringjax {

// A submission with the data that only the submitting rank needs. TaskQueue::Finish
// releases the addresses and the device point.
struct Task : Submission {
  Task(Submission what, std::shared_ptr<Gate> gate, uint64_t stream)
      : Submission(std::move(what)), work(std::move(gate), stream) {}
  ShortVector<void*, 1> ins, outs;
  std::vector<uint64_t> rooms;  // see EagerRequest
  DevicePointPtr mark;
  void* keep = nullptr;
  Work work;
  Clock::time_point since = Clock::now();
  uint64_t order = 0;        // position among this rank's submissions
  uint64_t epoch_index = 0;  // the epoch in whose ranks `root` is numbered
  double timeout = -1;       // see EagerRequest
  bool waits = false;        // see EagerRequest
};
using TaskPtr = std::shared_ptr<Task>;

// Returns the work of a task, which keeps the task alive.
inline std::shared_ptr<Work> WorkOf(TaskPtr task) {
  Work* const work = &task->work;
  return {std::move(task), work};
}

inline constexpr char kJoinTitle[] = "join";  // names a Join in errors

// Returns the task of this rank, `rank`, in a ready operation, or null if this rank has
// not submitted the operation. The entry of this rank is the pointer that was passed to
// Negotiation::Submit, a Task.
inline TaskPtr Mine(const Ready& ready, int rank) {
  return std::const_pointer_cast<Task>(
      std::static_pointer_cast<const Task>(ready.by_rank[static_cast<size_t>(rank)]));
}
// Mine without a reference of its own.
inline const Task* LookAtMine(const Ready& ready, int rank) {
  return static_cast<const Task*>(ready.by_rank[static_cast<size_t>(rank)].get());
}

}  // namespace ringjax
