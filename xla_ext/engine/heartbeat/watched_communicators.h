// WatchedCommunicators: the communicators that a heartbeat watches.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine/communicator/communicator.h"

namespace ringjax {

// Returns the index in ControlMessage::entered for calls of this communicator: 0 for
// the world, 1 for its control communicator (CUDA devices), -1 for all others.
int EnteredIndex(const Communicator& c);

// Finds communicators by their id or by a member, and reads how many calls they have
// entered and finished, for the messages of the heartbeat and the replies to straggler
// probes. A Heartbeat owns the object. Callers hold ControlConnections::mutex().
class WatchedCommunicators {
 public:
  void Add(const std::shared_ptr<Communicator>& communicator);
  void Remove(const Communicator* communicator);

  std::vector<std::shared_ptr<Communicator>> All() const;
  // Returns the communicators that have this world rank as a member.
  std::vector<std::shared_ptr<Communicator>> With(int rank) const;
  std::shared_ptr<Communicator> Find(int id) const;  // null if it is not watched

  // Returns the calls that this rank has entered, for ControlMessage::entered.
  std::array<uint64_t, 2> entered() const;
  // Returns the text of a kLeave message, which has room for 64 communicators. For the
  // other communicators, peers assume that this rank has finished no call.
  std::string FinishedCalls() const;

 private:
  // The pointers are weak, because a communicator may end while a heartbeat watches it.
  std::vector<std::weak_ptr<Communicator>> all_;
};

}  // namespace ringjax
