// SharedBeats: the beats between ranks of one host, in the memory that they share.
//
// A beat over a socket takes two system calls, and wakes the receiver. With hundreds of
// ranks on a host, idle ranks would spend most of their time on beats. In the memory, a
// beat is a store, and the receiver looks when it is awake for its own beats.
//
// A rank looks into the memory from the moment when it has a SharedBeats, and announces
// this there. Until then, its peers send it beats over its socket.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "transport/host_memory.h"

namespace ringjax {

// A Heartbeat owns the object. Callers hold ControlConnections::mutex().
class SharedBeats {
 public:
  using Entered = std::array<uint64_t, 2>;  // see ControlMessage::entered

  // `ranks`: the world ranks that share the memory, by their indices. `own`: this
  // rank's index.
  SharedBeats(std::shared_ptr<HostMemory> memory, int own,
              const std::vector<int>& ranks);

  void Beat(const Entered& entered);  // shows that this rank is alive
  // Returns whether a world rank looks into the memory, and needs no other beats.
  bool Reads(int rank) const;
  // Returns whether a world rank has sent a beat since the last call for this rank, and
  // sets `entered` then.
  bool HasBeat(int rank, Entered* entered);

 private:
  struct Peer {
    int index = -1;      // -1: the rank does not share the memory
    uint64_t beats = 0;  // the beats that HasBeat has seen
  };

  const std::shared_ptr<HostMemory> memory_;
  const int own_;
  std::vector<Peer> peers_;  // The index is a world rank. Later ranks share no memory.
};

}  // namespace ringjax
