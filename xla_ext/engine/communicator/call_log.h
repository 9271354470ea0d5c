// The log of the calls of one communicator: totals, the last call, the current wait,
// and an event of each call for the recorder.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <string_view>

#include "engine/call/descriptor.h"
#include "engine/communicator/comm_state.h"
#include "engine/communicator/requests.h"
#include "engine/communicator/straggler_probe.h"
#include "engine/recorder/recorder.h"

namespace ringjax {

// Totals of one collective. `bytes` are those of the tensors, `sent_bytes` those that
// this rank has put on the wire.
struct OpStats {
  uint64_t calls = 0, bytes = 0, sent_bytes = 0;
  double seconds = 0;
  std::map<std::string_view, uint64_t> algorithms;  // calls, by name in the table
};

// Only the thread that serves a call may use the functions of the first section, any
// thread those of the second. `state` must outlive the object.
class CallLog {
 public:
  explicit CallLog(const CommState& state) : state_(state) {}

  // -- the current call ---------------------------------------------------------------

  void Enter() { event_ = Event::Now(); }
  void Agreed() { event_.agreed = Event::Clock::now(); }
  // Enters a call whose ranks have agreed before.
  void EnterAgreed() {
    Enter();
    event_.agreed = event_.entered;
  }
  // Marks the call as one whose data a device moves after the agreement.
  void OnDevice(const Call& call);
  // Adds a request to the statistics, and its route to the event.
  void Count(const Request& request, std::string_view algorithm, std::string_view route,
             uint64_t sent_bytes);
  // Ends a call that has succeeded: Report, the statistics, and the last call.
  void Succeeded(const Call& call);
  // Ends a call whose data this communicator does not move, at the time of the
  // agreement: the ranks have refused the call or disagree, or a device moves the data.
  void AgreedOnly(const Call& call, Code outcome);
  // Completes the event of a call that has ended and passes it to the recorder.
  void Report(const Call& call, Event::Clock::time_point end, Code outcome);
  // `text` says what the call waits for: "it waits in barrier (seq 3) for rank 1".
  void Waiting(std::string text);
  void StoppedWaiting();
  // The event of the last call.
  const Event& event() const { return event_; }

  // -- diagnostics --------------------------------------------------------------------

  // The reply of this rank to a straggler probe.
  ProbeAnswer probe_answer() const;
  // Sets a function that describes what this process itself lacks for its next call:
  // "device 1 of its own to come to allreduce 'x'", or "" for nothing. `f` may be
  // called on any thread.
  void set_missing_locally(std::function<std::string()> f);
  std::map<std::string, OpStats> stats() const;
  // Clears the statistics. With `trial`, the recorder receives no calls until the next
  // Restart. Between two calls only.
  void Restart(bool trial);

 private:
  // Sets last_ and clears waiting_; needs mutex_.
  void SetLast(const Call& call, Event::Clock::time_point end);

  const CommState& state_;
  Event event_;               // the current call, as far as it got
  bool trial_ = false;        // see Restart
  mutable std::mutex mutex_;  // guards all below
  struct Last {               // the last call that has ended
    Collective op = Collective::kBarrier;
    std::string name;
    uint64_t sequence = 0;  // 0: there is none
    Event::Clock::time_point end;
  } last_;
  std::string waiting_;  // the call that has stalled, and a rank it waits for; or ""
  std::function<std::string()> missing_;
  std::array<OpStats, kCollectiveCount> stats_;  // totals by collective
};

}  // namespace ringjax
