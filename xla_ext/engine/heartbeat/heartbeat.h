// Heartbeat: one thread that detects lost peers of the world, and shows them that this
// rank is alive.
//
// The thread watches one connected, authenticated socket per peer. A closed socket
// means that the process is gone (known within milliseconds), silence that the process
// hangs or the network is cut. A rank that fails sends the reason. If it has lost a
// rank before, it sends that rank and its reason instead, so a cascade of failures
// still names the first culprit. Each message carries the number of world calls that
// its sender has entered: the number shows the late ranks.
//
// The sockets also carry other protocols, each of which is a part with its own state:
// straggler probes (ProbeSender, ProbeResponder), the teardown barrier
// (TeardownAnnouncements), waits (WaitReports) and the clock of another rank
// (ClockOffsets). The heartbeat thread gives each part the messages of its types, and
// the parts send through ControlConnections. The heartbeat thread replies to straggler
// probes with the state of the core, however busy the interpreter is.
//
// In an elastic job a rank that a communicator blames counts as lost, too. Each loss
// rings `notify`; the coordinator decides about the next epoch.
#pragma once

#include <cstdint>
#include <memory>
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
#include "engine/heartbeat/teardown_announcements.h"
#include "engine/heartbeat/wait_reports.h"
#include "engine/heartbeat/watched_communicators.h"
#include "transport/link.h"

namespace ringjax {

// Thread-safe. Must be owned by a shared_ptr: communicators hold weak references.
class Heartbeat : public std::enable_shared_from_this<Heartbeat> {
 public:
  using Peer = PeerState::Peer;

  // Starts the thread. `interval`: seconds between beats; `timeout`: seconds of silence
  // until a peer is lost. `wakeup` is an eventfd that nothing else uses. `notify` is
  // rung whenever lost() or left() grows; null: the job is not elastic. `inquire` is
  // rung when a peer probes this rank; null: probes are answered without the position
  // of the program. Throws std::system_error.
  Heartbeat(int rank, std::vector<Peer> peers, double interval, double timeout,
            std::unique_ptr<Doorbell> wakeup,
            std::unique_ptr<Doorbell> notify = nullptr,
            std::unique_ptr<Doorbell> inquire = nullptr);
  ~Heartbeat();
  void Stop();  // ends the thread and closes the sockets; only the first call counts

  // Aborts the communicator from now on when a member is lost, at once if one is lost
  // already, and sets its hooks.
  void Watch(const std::shared_ptr<Communicator>& communicator);
  void Forget(const Communicator* communicator);

  // Announces to all peers that this rank fails, and why. `culprit` is the world rank
  // to blame and `message` what it did. -1 blames this rank; if it has lost another
  // rank before, peers receive that rank and its reason instead.
  void Fail(const std::string& message, int culprit = -1);
  // Announces to all peers that this rank shuts down cleanly.
  void Leave();

  std::vector<std::pair<int, std::string>> lost() const;  // world ranks and reasons
  std::vector<int> left() const;  // world ranks that have shut down cleanly

  // The parts for the other protocols. The references are valid as long as this object.
  ClockOffsets& clock_offsets() { return clock_offsets_; }
  ProbeSender& probe_sender() { return probe_sender_; }
  ProbeResponder& probe_responder() { return probe_responder_; }
  TeardownAnnouncements& teardown_announcements() { return teardown_announcements_; }
  WaitReports& wait_reports() { return wait_reports_; }

 private:
  using Type = ControlMessage::Type;

  void WorkOn();
  void Work();
  void ReadFrom(PeerState* state);
  bool Parse(PeerState* state);
  bool Sensible(const ControlMessage& message) const;
  void CheckSilence();
  void Lose(int rank, const std::string& why);
  void OnLeave(PeerState* state, const std::string& text);
  std::vector<std::shared_ptr<Communicator>> WatchedWith(int rank) const;
  std::vector<int> LateRanks(int plane, uint64_t sequence) const;

  const Owner owner_;
  const double interval_, timeout_;
  const std::unique_ptr<Doorbell> wakeup_, notify_;
  // connections_.mutex() guards `watched_`, the states of the peers, `lost_` and
  // `last_look_`.
  WatchedCommunicators watched_;
  ControlConnections connections_;
  ClockOffsets clock_offsets_;
  ProbeSender probe_sender_;
  ProbeResponder probe_responder_;
  TeardownAnnouncements teardown_announcements_;
  WaitReports wait_reports_;
  std::vector<std::pair<int, std::string>> lost_;
  double last_look_ = 0;  // when CheckSilence ran last
  std::thread worker_;
};

}  // namespace ringjax
