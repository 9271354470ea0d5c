// ClockOffsets: compares the clock of the first rank with the clock of this rank, by
// requests and replies with four instants, as in NTP (RFC 5905).
//
// This rank notes when it sends a request and when the reply arrives, and the first
// rank notes when the request arrives and when it replies. The offset of the clocks is
// the difference between the midpoints of the two pairs. Its error is at most half of
// the round trip without the time at the peer, so the reading with the shortest round
// trip is the best. This rank sends a request only after the reply to the previous
// request, so that one busy moment disturbs few requests.
#pragma once

#include <string>
#include <vector>

#include "engine/heartbeat/control_connections.h"

namespace ringjax {

// A comparison of the clock of another rank with the clock of this rank, in seconds.
struct ClockReading {
  int rank = 0;
  double when = 0;   // clock of this rank when the reply arrived
  double ahead = 0;  // how much the other clock is ahead of the clock of this rank
  double trip = 0;   // round trip; half of it is the largest possible error of `ahead`
};

// Sends the requests and the replies, and stores the readings. A Heartbeat owns the
// object. The heartbeat thread calls HandleClock, and any thread may call the other
// functions. ControlConnections::mutex() guards the state.
class ClockOffsets {
 public:
  // `timeout`: seconds after which a request without a reply is given up.
  ClockOffsets(ControlConnections* connections, double timeout)
      : connections_(connections), timeout_(timeout) {}

  // Requests the clock of the first rank `times` times, one request after the other.
  // Does nothing on the first rank.
  void RequestClock(int times);
  std::vector<ClockReading> TakeReadings();  // returns the readings since the last call

  // Handles a message of type kClock, a request or a reply.
  void HandleClock(int from, const std::string& bytes);

 private:
  void SendRequest();  // the caller holds the mutex

  ControlConnections* const connections_;
  const double timeout_;
  std::vector<ClockReading> readings_;
  int requests_left_ = 0;    // requests that are still to be sent
  double requested_at_ = 0;  // when the last request was sent
};

}  // namespace ringjax
