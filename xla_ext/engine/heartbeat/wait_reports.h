// WaitReports: how long ranks wait. Each rank sends its latest waits with its beats to
// the first rank of the world, where they show the stragglers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "engine/heartbeat/control_connections.h"
#include "engine/recorder/recorder.h"

namespace ringjax {

// How long a rank waited for the other ranks in one call of the world.
struct Waited {
  uint32_t sequence = 0;  // low 32 bits of the sequence number of the call
  bool named = false;     // an operation of the eager lane; several may be one call
  uint32_t us = 0;        // microseconds of waiting
};
// The waits that a peer has reported.
struct Waits {
  uint64_t calls = 0;  // totals of the peer
  double wait_seconds = 0, move_seconds = 0;
  std::vector<Waited> latest;  // waits since the last TakeWaits, oldest first
  std::string place;           // where its program is, from SayWhere
};
// Returns the newest `most` waits of world calls that have not failed and come after
// the first `*seen` recorded calls. Sets `*seen` to the number of recorded calls.
std::vector<Waited> WaitsSince(const Recorder& recorder, uint64_t* seen, size_t most);

// The report of this rank, and the reports of its peers. A Heartbeat owns the object.
// The heartbeat thread calls TellWaits and OnWaits, any thread the other functions.
// ControlConnections::mutex() guards the state.
class WaitReports {
 public:
  explicit WaitReports(ControlConnections* connections)
      : connections_(connections), waits_(connections->states().size()) {}

  // Sends the waits of this rank, and the text of SayWhere, to the first rank with each
  // beat. With null, stops sending.
  void ShareWaits(std::shared_ptr<Recorder> recorder);
  void SayWhere(const std::string& place);
  // Takes the reports of the peers, by rank: totals, and the waits since the last
  // TakeWaits.
  std::map<int, Waits> TakeWaits();

  void TellWaits();  // called with each beat
  // Handles a message of type kWaits.
  void OnWaits(PeerState* state, const std::string& text);

 private:
  ControlConnections* const connections_;
  std::vector<Waits> waits_;            // waits of each peer, by PeerState::index
  std::shared_ptr<Recorder> recorder_;  // source of the waits that are sent, or null
  uint64_t shared_ = 0;                 // number of its calls at the last report
  std::string where_;
};

}  // namespace ringjax
