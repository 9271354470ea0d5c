// WaitReports: how long ranks wait for other ranks. Each rank sends its latest waits
// with its beats to the first rank of the world, which finds stragglers in them.
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
struct WaitRecord {
  uint32_t sequence = 0;        // low 32 bits of the sequence number of the call
  Lane lane = Lane::kCompiled;  // several operations of kNamed may have the same call
  uint32_t us = 0;              // microseconds of waiting
};
// The waits that a peer has reported.
struct PeerWaits {
  uint64_t calls = 0;  // totals of the peer
  double wait_seconds = 0, move_seconds = 0;
  std::vector<WaitRecord> latest;  // waits since the last TakeWaits, oldest first
  std::string place;               // position of the peer's program, from SetLocation
};
// Returns the waits of the calls of the world that were recorded after the first
// `*seen` calls and have not failed, but at most the newest `most`. Sets `*seen` to the
// number of recorded calls.
std::vector<WaitRecord> WaitsSince(const Recorder& recorder, uint64_t* seen,
                                   size_t most);

// Sends the report of this rank and stores the reports of its peers. A Heartbeat owns
// the object. The heartbeat thread calls SendWaits and HandleWaits, and any thread may
// call the other functions. ControlConnections::mutex() guards the state.
class WaitReports {
 public:
  explicit WaitReports(ControlConnections* connections) : connections_(connections) {}

  // Sends the waits of this rank, and the text of SetLocation, to the first rank with
  // each beat. A null `recorder` ends the sending.
  void ShareWaits(std::shared_ptr<Recorder> recorder);
  void SetLocation(const std::string& place);
  // Returns the reports of the ranks that have sent one, by world rank. Later calls do
  // not return the waits again.
  std::map<int, PeerWaits> TakeWaits();

  void SendWaits();  // called with each beat
  // Handles a message of type kWaits.
  void HandleWaits(int from, const std::string& text);

 private:
  ControlConnections* const connections_;
  std::map<int, PeerWaits> waits_;      // reports by rank
  std::shared_ptr<Recorder> recorder_;  // source of the waits of this rank, or null
  uint64_t shared_ = 0;                 // calls in recorder_ at the last report
  std::string where_;
};

}  // namespace ringjax
