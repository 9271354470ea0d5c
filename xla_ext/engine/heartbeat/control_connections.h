// ControlConnections: the connections of a heartbeat to its neighbours among the ranks
// of the world, and messages to all other ranks over them. See heartbeat.h.
//
// The neighbours include the ranks at distances of powers of two in both directions
// (links/standing.py). A message to another rank goes to the neighbour that is nearest
// to the destination on the circle of the ranks, and that neighbour passes the message
// on. The distance halves at least with each hop, as in Chord (Stoica et al., "Chord: A
// scalable peer-to-peer lookup service", SIGCOMM 2001). Messages are not repeated: a
// message is lost if a rank on its way is lost.
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
#include "transport/event_fd.h"

namespace ringjax {

// Returns the current time in seconds of the steady clock.
double SecondsNow();

// One neighbour: its connection and its state. Only the heartbeat thread uses `input`
// and receives from the channel. The mutex of the ControlConnections guards the other
// members that change.
struct PeerState {
  struct Peer {
    int rank;              // rank in the world
    int fd;                // connected stream socket; the channel owns it
    std::string key = {};  // key of the channel; no encryption if empty
  };
  explicit PeerState(const Peer& p)
      : peer(p), channel(p.fd, KeyOf(p.key)), encrypted(!p.key.empty()) {
    peer.key.clear();
  }

  Peer peer;
  Channel channel;
  const bool encrypted;
  std::string input;         // received bytes of an incomplete message
  std::string output;        // unsent rest of a message that was sent in part
  double heard = 0;          // when the last bytes arrived, in seconds of SecondsNow
  uint64_t entered[2] = {};  // see ControlMessage::entered
  bool open = true;          // false after Close
  bool left = false;         // whether the peer has shut down cleanly
  // Whether the peer continues in another epoch, so that no more messages are for this
  // heartbeat. `input` is then the kEpoch message alone.
  bool moved_on = false;
  // If `left`: the calls that the peer had finished, by communicator id.
  std::map<int, uint64_t> finished;
};

// The connection to a neighbour after the end of a heartbeat: the caller owns `fd`.
// `input` was received and not handled, `output` is the unsent rest of a message.
struct ReleasedConnection {
  int rank;
  int fd;
  std::string input, output;
};

// Owns the sockets and an epoll descriptor for them, and writes messages without
// blocking for long. The heartbeat thread waits on epoll and reads; any thread may
// send. A Heartbeat owns the object, and the protocols of the heartbeat send through
// it.
//
// mutex() also guards the state of these protocols. A protocol changes its state and
// sends the message about that change under one lock, so that the messages on a
// connection are in the order of the changes. No thread may hold the mutex when it
// calls Communicator::Abort, because the lock that Abort takes comes first in the lock
// order.
class ControlConnections {
 public:
  // Takes ownership of the sockets of the neighbours `peers`, and registers them and
  // `wakeup` with epoll. `hosts` are the names of the hosts of all ranks, for texts.
  // Every message contains the numbers of calls that `watched` has entered. `watched`
  // must outlive the object. Throws std::system_error.
  ControlConnections(int rank, std::vector<std::string> hosts,
                     const std::vector<PeerState::Peer>& peers, const EventFd& wakeup,
                     const WatchedCommunicators* watched);
  ~ControlConnections();
  ControlConnections(const ControlConnections&) = delete;
  ControlConnections& operator=(const ControlConnections&) = delete;

  int rank() const { return rank_; }  // this rank, in the world
  int size() const { return static_cast<int>(hosts_.size()); }  // size of the world
  const std::string& host(int rank) const { return hosts_[rank]; }
  // The epoll descriptor. The data of an event is a PeerState*, or null for `wakeup`.
  int epoll() const { return epoll_; }
  std::mutex& mutex() const { return mutex_; }

  // Sends a message to all neighbours. Waits up to 100 ms for each neighbour that
  // accepts no bytes.
  void SendToNeighbours(ControlMessage::Type type, int culprit,
                        const std::string& text);

  // -- the caller holds mutex() ------------------------------------------------------

  // All neighbours. The member `peer` never changes, and may be read without the mutex.
  std::span<PeerState> states() { return states_; }
  std::span<const PeerState> states() const { return states_; }
  void Beat(PeerState* state);  // sends kBeat, unless the neighbour accepts no bytes
  // Sends a message to any other rank, over other ranks if it is no neighbour. Drops
  // the message if the next rank accepts no bytes at the moment.
  void Send(int rank, ControlMessage::Type type, std::string_view text);
  // Passes a message on to its destination.
  void Forward(const ControlMessage& message, std::string_view text);
  void Close(PeerState* state);  // may be called twice
  void CloseAll();
  // Ignores further bytes of a peer, because it continues in another epoch.
  void StopReading(PeerState* state);
  // Gives up the open connections without a key whose peers have not left.
  std::vector<ReleasedConnection> ReleaseOpen();
  // Whether the heartbeat has stopped or is about to stop. Then no protocol may begin
  // an exchange.
  bool stopping() const { return stopping_; }
  void set_stopping() { stopping_ = true; }

  // For a forked child, where no other thread runs: forgets the sockets without closing
  // them.
  void Release();

 private:
  void RegisterSockets(const EventFd& wakeup);
  void Deregister(const PeerState& state);
  // The caller of the next functions holds mutex_.
  PeerState* NextHop(int rank);
  ControlMessage Head(ControlMessage::Type type, int to, int culprit,
                      size_t length) const;
  void Write(PeerState* state, const std::string& message, int limit_ms);

  const int rank_;
  const std::vector<std::string> hosts_;
  const WatchedCommunicators* const watched_;
  int epoll_ = -1;  // unlike poll, epoll takes no time for each idle socket
  mutable std::mutex mutex_;
  std::vector<PeerState> states_;  // never resized, because epoll has the addresses
  bool stopping_ = false;
};

}  // namespace ringjax
