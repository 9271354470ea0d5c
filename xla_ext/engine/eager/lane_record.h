// LaneRecord: reports the operations of an eager lane to the recorder and to a
// timeline. Each rank receives the submissions of all ranks, so the timeline of one
// rank shows when every rank has submitted an operation.
#pragma once

#include <atomic>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "engine/call/waiter.h"
#include "engine/communicator/communicator.h"
#include "engine/eager/lane_state.h"
#include "engine/eager/negotiation.h"
#include "engine/eager/task.h"
#include "engine/eager/timeline.h"

namespace ringjax {

// Owned by an EagerLane. Any thread may call set_timeline. Only the thread that holds
// the progress lock calls the other functions.
class LaneRecord {
 public:
  explicit LaneRecord(LaneState& state);

  // Reports to `timeline` from the next round on. Pass null to end the reports.
  void set_timeline(std::shared_ptr<Timeline> timeline);

  void BeginRound();
  // `first` and `end` are ranks of the set; `end` is not included.
  void Submitted(const Submission& s, int first, int end) const {
    for (int rank = first; recording_ && rank < end; ++rank)
      recording_->Submitted(RowOf(s), communicator_->options().world_ranks[rank]);
  }
  void RecordRun(const Decision& decision) const;
  void RecordEnd(const Decision& decision, const Status& status) const;
  void Failed(const Submission& s, const std::string& why) const;
  // Adds an event for each task to the recorder. `agreed` is the time at which all
  // ranks had submitted the tasks, or a default time_point if some rank never did.
  void Report(std::span<const TaskPtr> tasks, Clock::time_point agreed,
              const Status& status) const;

 private:
  Timeline::Row RowOf(const Submission& s) const;

  LaneState& state_;
  const std::shared_ptr<Communicator>& communicator_;  // the lane's current epoch
  std::shared_ptr<Timeline> recording_;                // timeline_ at BeginRound
  std::shared_ptr<Timeline> timeline_;                 // guarded by LaneState::mutex
  // Whether timeline_ was set after BeginRound read it. Written with LaneState::mutex.
  std::atomic<bool> is_new_{false};
};

}  // namespace ringjax
