// ControlConnections: the connections of a heartbeat to all other ranks of the world,
// and how messages are written to them. See heartbeat.h.
#pragma once

#include <cstddef>
#include <map>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/heartbeat/control_message.h"
#include "engine/heartbeat/watched_communicators.h"
#include "transport/channel.h"
#include "transport/link.h"

namespace ringjax {

// The present time, in seconds of the steady clock.
double SecondsNow();

// One peer: its connection, and what this rank knows about it. Only the heartbeat
// thread uses `input` and receives; the mutex of the ControlConnections guards the
// members that change.
struct PeerState {
  struct Peer {
    int rank;               // rank in the world
    int fd;                 // connected stream socket; the channel owns it
    std::string host = {};  // name of its host, for texts
    std::string key = {};   // key of the channel; no encryption if empty
  };
  PeerState(const Peer& p, size_t i) : peer(p), index(i), channel(p.fd, KeyOf(p.key)) {
    peer.key.clear();
  }

  Peer peer;
  size_t index;  // among ControlConnections::states
  Channel channel;
  std::string input;   // bytes of an incomplete message, at most one message
  std::string output;  // unsent rest of a message that was begun
  double heard = 0;    // last bytes received at, in seconds of SecondsNow
  uint64_t entered[2] = {};
  bool open = true, left = false;
  std::map<int, uint64_t> finished;  // if `left`: finished calls, by communicator id
};

// Owns the sockets and their epoll, and writes messages without blocking for long. The
// heartbeat thread waits on epoll and reads; any thread may send. A Heartbeat owns the
// object, and the protocols of the heartbeat send through it.
//
// mutex() also guards the state of these protocols: a protocol changes its own state
// and sends the message about that change under one lock, so that the order of messages
// on a connection is the order of changes. The mutex is never held in
// Communicator::Abort, whose lock comes before it.
class ControlConnections {
 public:
  // Takes the sockets of the peers, and registers them and `wakeup` with epoll. Every
  // message says how many calls of `watched` this rank has entered. `watched` must
  // outlive the object. Throws std::system_error.
  ControlConnections(int rank, const std::vector<PeerState::Peer>& peers,
                     const Doorbell& wakeup, const WatchedCommunicators* watched);
  ~ControlConnections();
  ControlConnections(const ControlConnections&) = delete;
  ControlConnections& operator=(const ControlConnections&) = delete;

  int rank() const { return rank_; }  // this rank, in the world
  // The epoll descriptor. The data of an event is a PeerState*, or null for `wakeup`.
  int epoll() const { return epoll_; }
  std::mutex& mutex() const { return mutex_; }

  // Sends a message to all peers, and waits a moment for those that accept no bytes,
  // unless the message is a beat.
  void Tell(ControlMessage::Type type, int culprit, const std::string& text);

  // -- with mutex() held --------------------------------------------------------------

  // All peers. The member `peer` never changes, and may be read without the mutex.
  std::span<PeerState> states() { return states_; }
  std::span<const PeerState> states() const { return states_; }
  // The connection to the first rank of the world; null on that rank.
  PeerState* FirstRank();
  // Sends a message, unless the peer accepts no bytes at present.
  void Send(PeerState* state, ControlMessage::Type type, std::string_view text);
  void Close(PeerState* state);  // may be called twice
  void CloseAll();
  // Whether the heartbeat has stopped or is about to stop: no protocol may begin an
  // exchange then.
  bool stopping() const { return stopping_; }
  void set_stopping() { stopping_ = true; }

  // In a forked child, where no other thread runs: gives the sockets up and does not
  // close them.
  void Release();

 private:
  void Expect(const Doorbell& wakeup);
  // The next two with mutex_ held.
  std::string Bytes(ControlMessage::Type type, int culprit,
                    std::string_view text) const;
  void Write(PeerState* state, const std::string& message, int limit_ms);

  const int rank_;
  const WatchedCommunicators* const watched_;
  int epoll_ = -1;  // epoll: unlike poll, it takes no time for each idle socket
  mutable std::mutex mutex_;
  std::vector<PeerState> states_;  // never resized: epoll has their addresses
  bool stopping_ = false;
};

}  // namespace ringjax
