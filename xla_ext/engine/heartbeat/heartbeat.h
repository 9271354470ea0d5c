// Heartbeat: one thread that detects lost peers of the world, and shows them that this
// rank is alive.
//
// The thread watches one connected, authenticated socket for each neighbour
// (ControlConnections), so the number of beats grows with P log P and not with the
// square of the P ranks. Ranks of one host exchange beats in the memory that they share
// (SharedBeats). A closed socket means that the process has ended, and is noticed
// within milliseconds. Silence means that the process hangs or the network is
// cut. A rank that fails sends the reason. If it has lost a rank before, it sends the
// rank and the reason of that loss instead, so a cascade of failures still names the
// first culprit. Each message carries the number of calls of the world that its sender
// has entered, which shows late ranks.
//
// In a static job, each rank passes on a loss to its neighbours once, so all ranks know
// the loss after log2(P) / 2 hops (the reliable broadcast of Bosilca et al., "Failure
// detection and propagation in HPC systems", SC 2016). In an elastic job, only the
// ranks that have noticed the loss themselves report it to the coordinator, which
// weighs such reports and notifies all ranks.
//
// The sockets also carry other protocols. Each of them is a class with its own state:
// straggler probes (ProbeSender, ProbeResponder), the teardown barrier
// (TeardownAnnouncements), waits (WaitReports) and the clock of another rank
// (ClockOffsets). The heartbeat thread passes each class the messages of its types, and
// the classes send through ControlConnections. The heartbeat thread replies to
// straggler probes with the state of the core, even if the interpreter is busy.
//
// A heartbeat ends with its epoch, but its connections may not: Release returns them,
// and the ranks announce the next epoch on them by kEpoch messages. A heartbeat whose
// peer has announced another epoch reads nothing more from that peer, and does not
// expect beats from it (links/kept_connections.py).
//
// In an elastic job, a rank that a communicator blames also counts as lost. Each loss
// rings `notify`, and the coordinator decides about the next epoch.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engine/call/owner.h"
#include "engine/communicator/communicator.h"
#include "engine/heartbeat/clock_offsets.h"
#include "engine/heartbeat/control_connections.h"
#include "engine/heartbeat/control_message.h"
#include "engine/heartbeat/probe_responder.h"
#include "engine/heartbeat/probe_sender.h"
#include "engine/heartbeat/shared_beats.h"
#include "engine/heartbeat/teardown_announcements.h"
#include "engine/heartbeat/wait_reports.h"
#include "engine/heartbeat/watched_communicators.h"
#include "transport/event_fd.h"

namespace ringjax {

// Thread-safe. Must be owned by a shared_ptr: communicators hold weak references.
class Heartbeat : public std::enable_shared_from_this<Heartbeat> {
 public:
  using Peer = PeerState::Peer;

  // Starts the thread. `hosts`: the names of the hosts of all ranks of the world;
  // `neighbours`: see ControlConnections. `interval`: seconds between beats; `timeout`:
  // seconds of silence after which a neighbour is lost. `wakeup` is an eventfd for the
  // heartbeat alone. The heartbeat rings `notify`, which is null in a static job,
  // whenever lost() or left() grows, and `inquire` when a peer probes this rank. With a
  // null `inquire`, replies do not contain the position of the program. Throws
  // std::system_error.
  Heartbeat(int rank, std::vector<std::string> hosts, std::vector<Peer> neighbours,
            double interval, double timeout, std::unique_ptr<EventFd> wakeup,
            std::unique_ptr<EventFd> notify = nullptr,
            std::unique_ptr<EventFd> inquire = nullptr);
  ~Heartbeat();
  void Stop();  // ends the thread and closes the sockets; may be called twice
  // Ends the thread like Stop, and returns the connections that the next epoch can use.
  // Sends kLeave on all other connections and closes them.
  std::vector<ReleasedConnection> Release();

  // Sets the communicator's hooks. From now on, aborts the communicator when a member
  // is lost, and immediately if a member has already been lost. If `sharing` has ranks,
  // these world ranks share the communicator's memory, in this order, and beats between
  // them go through the memory.
  void Watch(const std::shared_ptr<Communicator>& communicator,
             const std::vector<int>& sharing = {});
  void Forget(const Communicator* communicator);

  // Announces a failure of this rank to its neighbours. `culprit` is the world rank to
  // blame, and `message` is a predicate of that rank. -1 blames this rank, or the first
  // rank that it has lost; then the peers receive the reason of that loss.
  void Fail(const std::string& message, int culprit = -1);
  // Announces to the neighbours that this rank shuts down cleanly. Other ranks learn it
  // from a neighbour whose call fails for this reason.
  void Leave();

  std::vector<std::pair<int, std::string>> lost() const;  // world ranks and reasons
  std::vector<int> left() const;  // neighbours that have shut down cleanly

  // The classes of the other protocols. The references are valid as long as this
  // object.
  ClockOffsets& clock_offsets() { return clock_offsets_; }
  ProbeSender& probe_sender() { return probe_sender_; }
  ProbeResponder& probe_responder() { return probe_responder_; }
  TeardownAnnouncements& teardown_announcements() { return teardown_announcements_; }
  WaitReports& wait_reports() { return wait_reports_; }

 private:
  using Type = ControlMessage::Type;

  void EndThread();
  void RunThread();
  void RunLoop();
  void ReadFrom(PeerState* state);
  void HandleMessage(PeerState* state);
  size_t MissingBytes(const PeerState& state) const;
  bool IsValid(const ControlMessage& message) const;
  void SendBeats();
  void CheckSilence();
  void Dispatch(const ControlMessage& message, const std::string& text);
  void HandleDisconnection(int rank, const std::string& why);
  void MarkLost(int rank, const std::string& why);
  void HandleFailure(const ControlMessage& message, const std::string& text);
  void HandleLeave(PeerState* state, const std::string& text);
  void SendLeave();
  std::vector<std::shared_ptr<Communicator>> WatchedWith(int rank) const;
  std::vector<int> LateRanks(int index, uint64_t sequence) const;

  const Owner owner_;
  const double interval_, timeout_;
  const std::unique_ptr<EventFd> wakeup_, notify_;
  // connections_.mutex() guards watched_, the states of the peers, shared_beats_, lost_
  // and last_look_.
  WatchedCommunicators watched_;
  ControlConnections connections_;
  std::optional<SharedBeats> shared_beats_;  // empty if no other rank shares memory
  ClockOffsets clock_offsets_;
  ProbeSender probe_sender_;
  ProbeResponder probe_responder_;
  TeardownAnnouncements teardown_announcements_;
  WaitReports wait_reports_;
  std::vector<std::pair<int, std::string>> lost_;
  double last_look_ = 0;  // when CheckSilence ran last
  std::mutex ending_;     // held by EndThread
  std::thread worker_;
};

}  // namespace ringjax
