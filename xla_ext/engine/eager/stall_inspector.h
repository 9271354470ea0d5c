// StallInspector: warns about operations that only some ranks have submitted, and makes
// them fail after a timeout, like Horovod's stall inspector. Each rank measures the
// time by its own clock, but an operation fails only by a common decision of all ranks
// (Negotiation::Expire).
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/call/waiter.h"
#include "engine/communicator/communicator.h"
#include "engine/communicator/straggler_probe.h"
#include "engine/eager/lane_state.h"
#include "engine/eager/negotiation.h"
#include "engine/eager/task.h"

namespace ringjax {

// Owned by a ProgressEngine. Used only by the thread that holds the progress lock.
class StallInspector {
 public:
  explicit StallInspector(LaneState& state);

  // The time at which Watch must be called next, or max() while no operation is
  // pending.
  Clock::time_point next_look() const { return next_look_; }
  bool IsDue() const {
    return next_look_ != Clock::time_point::max() && Clock::now() >= next_look_;
  }
  // Warns about operations that wait for other ranks, and expires those whose timeout
  // has passed.
  void Watch(Negotiation* negotiation);

  void OnTaken(const Task& task) { own_timeout_ |= task.timeout > 0; }
  // Called after each round. `pending` says whether operations wait for other ranks.
  void EndRound(bool pending) {
    const bool looks = own_timeout_ || next_look_ == Clock::time_point::max();
    if (pending && looks) next_look_ = Clock::now();
    own_timeout_ = false;
  }
  // Forgets all operations. Called when a new negotiation begins.
  void Clear() {
    watched_.clear();
    next_look_ = Clock::time_point::max();
  }

 private:
  // An operation that waits for other ranks.
  struct Watched {
    Clock::time_point since;        // when Watch first found it
    StallPolicy stall_policy = {};  // when to probe and warn
    bool expired = false;           // whether this rank has called Negotiation::Expire
  };
  struct Late {
    const Negotiation::Waiting* waiting;
    double seconds;
  };

  void Warn(const std::vector<Late>& late) const;
  bool CheckOperation(const Negotiation::Waiting& waiting, double seconds,
                      Negotiation* negotiation, Watched* w, std::vector<Late>* late);
  double LimitOf(const Negotiation::Waiting& waiting) const;
  std::vector<int> WorldRanks(const std::vector<int>& ranks) const;
  std::string ReplyTexts(const std::vector<int>& ranks) const;

  const EagerOptions& options_;
  const std::shared_ptr<Communicator>& communicator_;  // the lane's current epoch
  bool own_timeout_ =
      false;  // whether a task since the last EndRound has its own timeout
  std::unordered_map<uint64_t, Watched> watched_;  // key: Negotiation::Waiting::id
  Clock::time_point next_look_ = Clock::time_point::max();
};

}  // namespace ringjax
