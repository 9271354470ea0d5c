// ProbeResponder: the replies of this rank to straggler probes over the sockets of the
// heartbeat. See straggler_probe.h.
//
// A rank replies immediately if it has made the call that the probe is about, or if it
// has no `inquire`. Otherwise it rings `inquire`, which wakes a Python thread, and
// waits up to half a second until that thread calls Answer with the position of the
// program. After that time the rank replies that the interpreter is busy: some thread
// holds the GIL, or no thread of the interpreter runs.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/heartbeat/control_connections.h"
#include "engine/heartbeat/watched_communicators.h"
#include "transport/event_fd.h"

namespace ringjax {

// Stores the probes of peers until their replies are due. A Heartbeat owns the object.
// The thread that `inquire` wakes calls asked and Answer, and the heartbeat thread
// calls the other functions. ControlConnections::mutex() guards the state.
class ProbeResponder {
 public:
  // `wakeup` wakes the heartbeat thread. The object rings `inquire` when a peer probes
  // this rank. With a null `inquire`, replies have no position of the program.
  ProbeResponder(ControlConnections* connections, const WatchedCommunicators* watched,
                 EventFd* wakeup, std::unique_ptr<EventFd> inquire)
      : connections_(connections),
        watched_(watched),
        wakeup_(wakeup),
        inquire_(std::move(inquire)) {}

  // The probes that wait for Answer.
  struct Asked {
    uint64_t newest = 0;  // number of the newest probe; 0 if there is none
    // "rank 0 waits for this rank to call allreduce 'x' (...)". asked() returns each
    // stalled call only once.
    std::vector<std::string> stalls;
  };
  Asked asked();
  // Sets the position of the program for the replies to all probes up to number
  // `newest`: "it is at train.py:41".
  void Answer(uint64_t newest, const std::string& position);

  // Handles a message of type kProbe.
  void HandleProbe(int from, const std::string& text);
  // Returns when the next reply is due, or infinity if there is none.
  double NextReplyTime() const;
  void SendDueReplies();

 private:
  // A probe that waits for Answer.
  struct OpenProbe {
    int asker = -1;
    uint64_t number = 0;
    ControlMessage::ProbeHead head;
    double until = 0;  // latest time of the reply
    std::string what;
  };

  void Reply(int to, const ControlMessage::ProbeHead& asked,
             const std::string& position);
  std::shared_ptr<Communicator> Watched(int id) const;
  std::string LatestTrace() const;

  ControlConnections* const connections_;
  const WatchedCommunicators* const watched_;
  EventFd* const wakeup_;
  const std::unique_ptr<EventFd> inquire_;
  std::vector<OpenProbe> probes_;  // oldest first
  uint64_t last_probe_ = 0;        // number of the newest probe
  uint64_t positioned_ = 0;        // position_ belongs to the probes up to this number
  std::string position_;           // position of the program, from Answer
  // Stalled calls that asked() has returned: id of the communicator, sequence number.
  std::vector<std::pair<int, uint64_t>> reported_stalls_;
};

}  // namespace ringjax
