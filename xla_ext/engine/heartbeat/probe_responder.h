// ProbeResponder: the replies of this rank to straggler probes over the sockets of the
// heartbeat. See straggler_probe.h.
//
// A rank replies immediately if it has made the call in question, or has no `inquire`.
// Otherwise it rings `inquire`, which wakes a Python thread, and waits until that
// thread calls Answer with the position of the program, for half a second at most.
// After that time the rank replies that the interpreter is busy: a thread holds the
// interpreter's lock, or no thread of the interpreter runs.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/heartbeat/control_connections.h"
#include "engine/heartbeat/watched_communicators.h"
#include "transport/link.h"

namespace ringjax {

// Keeps the probes of peers until their replies are due. A Heartbeat owns the object.
// The thread that `inquire` wakes calls asked and Answer, the heartbeat thread the
// other functions. ControlConnections::mutex() guards the state.
class ProbeResponder {
 public:
  // `wakeup` wakes the heartbeat thread. `inquire` is rung when a peer probes this
  // rank; null: probes are answered without the position of the program.
  ProbeResponder(ControlConnections* connections, const WatchedCommunicators* watched,
                 Doorbell* wakeup, std::unique_ptr<Doorbell> inquire)
      : connections_(connections),
        watched_(watched),
        wakeup_(wakeup),
        inquire_(std::move(inquire)) {}

  // The probes from peers that wait for Answer, for the thread that `inquire` wakes.
  struct Asked {
    uint64_t newest = 0;  // number of the newest probe; 0 if there is none
    // "rank 0 waits for this rank to call allreduce 'x' (...)"; each stall only once.
    std::vector<std::string> stalls;
  };
  Asked asked();
  // Answers the probes up to number `newest`. `place`: "it is at train.py:41".
  void Answer(uint64_t newest, const std::string& place);

  // Handles a message of type kAsk.
  void OnAsk(PeerState* state, const std::string& text);
  double NextAnswer() const;  // when the next reply to a probe is due; or infinity
  void AnswerWhatIsDue();

 private:
  // A probe from a peer that waits for Answer.
  struct Open {
    PeerState* asker = nullptr;
    uint64_t number = 0;
    ControlMessage::AskHead head;
    double until = 0;  // latest time of the reply
    std::string what;
  };

  void Reply(PeerState* state, const ControlMessage::AskHead& asked,
             const std::string& place);
  std::shared_ptr<Communicator> Watched(int id) const;
  std::string OwnTrace() const;

  ControlConnections* const connections_;
  const WatchedCommunicators* const watched_;
  Doorbell* const wakeup_;
  const std::unique_ptr<Doorbell> inquire_;
  std::vector<Open> questions_;  // probes from peers, oldest first
  uint64_t question_ = 0;        // number of the last probe from a peer
  uint64_t placed_ = 0;          // `place_` answers the probes up to this number
  std::string place_;
  std::vector<std::pair<int, uint64_t>> told_;  // stalls that asked() has returned
};

}  // namespace ringjax
