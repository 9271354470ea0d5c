// ClockOffsets: the clock of the first rank compared with the clock of this rank, by
// requests and replies with four instants each, as in NTP (RFC 5905).
//
// The offset of the clocks is the difference between the midpoints of the instants on
// both sides. Its error is at most half of the round trip, without the time spent at
// the peer: the reading with the shortest round trip is the best. This rank sends a
// request only after the reply to the last one, so that few requests meet the same busy
// moment.
#pragma once

#include <string>
#include <vector>

#include "engine/heartbeat/control_connections.h"

namespace ringjax {

// A comparison of the clock of another rank with the clock of this rank, in seconds.
struct ClockReading {
  int rank = 0;
  double when = 0, ahead = 0;  // own clock at the reply; lead of the other clock
  double trip = 0;             // round trip; half of it is the largest possible error
};

// The requests for the clock of the first rank, the replies to such requests, and the
// readings. A Heartbeat owns the object. The heartbeat thread calls OnClock, any thread
// the other functions. ControlConnections::mutex() guards the state.
class ClockOffsets {
 public:
  // `timeout`: seconds until an unanswered request is given up.
  ClockOffsets(ControlConnections* connections, double timeout)
      : connections_(connections), timeout_(timeout) {}

  // Requests the clock of the first rank `times` times, each time after the reply to
  // the last request. Has no effect on the first rank.
  void AskClock(int times);
  std::vector<ClockReading> TakeClocks();  // the readings since the last TakeClocks

  // Handles a message of type kClock, a request or a reply.
  void OnClock(PeerState* state, const std::string& bytes);

 private:
  void SendClock(PeerState* state);  // the caller holds the mutex

  ControlConnections* const connections_;
  const double timeout_;
  std::vector<ClockReading> clocks_;
  int clocks_left_ = 0;     // requests that are still to be sent
  double clock_asked_ = 0;  // when the last request was sent
};

}  // namespace ringjax
