// StallInspector: warns about operations that some ranks have submitted and others have
// not, and ends the wait for them. Horovod has a stall inspector, too. Each rank goes
// by its own clock, but an operation fails only by a decision of all ranks
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

// Owned by ProgressEngine, and used by the holder of the progress lock only.
class StallInspector {
 public:
  explicit StallInspector(LaneState& state);

  // The time at which Watch is to be called next. max(): no operation is pending, so
  // not before a round has left one pending.
  Clock::time_point next_look() const { return next_look_; }
  // Looks at all operations that wait for other ranks.
  void Watch(Negotiation* negotiation);

  void TakenIn(const Task& task) { hurries_ |= task.timeout > 0; }
  // `pending`: whether operations wait for other ranks after the round.
  void EndRound(bool pending) {
    const bool looks = hurries_ || next_look_ == Clock::time_point::max();
    if (pending && looks) next_look_ = Clock::now();
    hurries_ = false;
  }
  // Forgets all operations, because a new negotiation begins.
  void Clear() {
    watched_.clear();
    next_look_ = Clock::time_point::max();
  }

 private:
  // An operation that waits for other ranks: since when, which warnings were printed,
  // and whether this rank has expired it.
  struct Watched {
    Clock::time_point since;
    StallPolicy stall_policy = {};
    bool expired = false;
  };
  struct Late {
    const Negotiation::Waiting* waiting;
    double seconds;
  };

  void Warn(const std::vector<Late>& late) const;
  bool LookAt(const Negotiation::Waiting& waiting, double seconds,
              Negotiation* negotiation, Watched* w, std::vector<Late>* late);
  double LimitOf(const Negotiation::Waiting& waiting) const;
  std::vector<int> World(const std::vector<int>& ranks) const;
  std::string ReplyTexts(const std::vector<int>& ranks) const;

  const EagerOptions& options_;
  const std::shared_ptr<Communicator>& communicator_;  // the lane's current epoch
  bool hurries_ = false;  // a task taken in since EndRound has its own timeout
  // The watched keys, by Negotiation::Waiting::id.
  std::unordered_map<uint64_t, Watched> watched_;
  Clock::time_point next_look_ = Clock::time_point::max();
};

}  // namespace ringjax
