// CallLog: keeps totals, the last call and the current wait of one communicator, and
// sends an event of each call to the recorder.
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

// Totals of one collective.
struct OpStats {
  uint64_t calls = 0;
  uint64_t bytes = 0;       // bytes of the tensors
  uint64_t sent_bytes = 0;  // bytes that this rank has sent
  double seconds = 0;
  std::map<std::string_view, uint64_t> algorithms;  // number of requests, by algorithm
};

// Only the thread that runs a call may use the functions from Enter to event. Any
// thread may use the functions from trace on. `state` must outlive the object.
class CallLog {
 public:
  explicit CallLog(const CommState& state) : state_(state) {}

  // -- functions for the thread that runs a call -------------------------------------

  void Enter() { event_ = Event::Now(); }
  void Agreed() { event_.agreed = Event::Clock::now(); }
  // Enters a round. A round is no call, so its event has no times.
  void EnterRound() { event_ = Event(); }
  // Enters a call to which all ranks have agreed at `agreed`.
  void EnterAgreed(Event::Clock::time_point agreed) {
    event_ = Event();
    event_.entered = event_.agreed = agreed;
  }
  // Records messages of `bytes` bytes between pairs of ranks, which have ended. They
  // were entered by EnterAgreed, because their ranks do not agree before.
  void Exchanged(const Call& call, uint64_t bytes);
  // Records that a device moves the data of the call after the agreement.
  void OnDevice(const Call& call);
  // Adds a request to the statistics, and the route of the request to the event.
  void Count(const Request& request, std::string_view algorithm, std::string_view route,
             uint64_t sent_bytes);
  // Counts an attempt to make the call that wrong bits have spoiled.
  void CountFault(const Call& call);
  // Ends a call that has succeeded: calls Record, and updates the statistics and the
  // last call.
  void Succeeded(const Call& call);
  // Ends a call at the time of the agreement, because this communicator moves no data:
  // the ranks have refused the call or disagree, or a device moves the data.
  void EndedAtAgreement(const Call& call, Code outcome);
  // Completes the event of a call that has ended and passes it to the recorder.
  void Record(const Call& call, Event::Clock::time_point end, Code outcome);
  // Stores a text about the current wait: "it waits in barrier (seq 3) for rank 1", and
  // that world rank, or -1 if the call waits for no particular rank.
  void SetWaiting(std::string text, int rank);
  void ClearWaiting();
  // Returns the event of the last call.
  const Event& event() const { return event_; }

  // -- diagnostics for any thread ----------------------------------------------------

  // Returns the reply of this rank to a straggler probe.
  CallTrace trace() const;
  // Sets a function that returns which devices of this process the next call still
  // waits for, such as "device 1 of its own to come to allreduce 'x'", or "" if the
  // call waits for none. `f` must be thread-safe.
  void set_missing_locally(std::function<std::string()> f);
  std::map<std::string, OpStats> stats() const;
  // Clears the statistics. With `trial`, the recorder receives no calls until the next
  // Restart. Must be called between two calls.
  void Restart(bool trial);

 private:
  // Sets last_ and clears waiting_. The caller holds mutex_.
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
  std::string waiting_;  // the stalled call and the rank that it waits for, or ""
  int waits_for_ = -1;   // this rank
  std::function<std::string()> missing_;         // see set_missing_locally
  std::array<OpStats, kCollectiveCount> stats_;  // totals by collective
};

}  // namespace ringjax
