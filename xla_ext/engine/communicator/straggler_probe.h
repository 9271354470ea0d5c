// Straggler probes: requests to late ranks to report where their programs are.
//
// A rank that has waited for a long time probes the late ranks and continues to wait.
// The replies arrive a moment later and become part of the warning or the error. The
// heartbeat carries probes and replies, because its thread replies even if all other
// threads of the rank are busy. StallPolicy decides when compiled programs and the
// eager lane send probes.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace ringjax {

// A probe of some ranks about one call, or about one operation of an eager lane.
struct ProbeRequest {
  int communicator = 0;    // its id
  uint64_t sequence = 0;   // id of the call or operation, equal on all ranks
  bool operation = false;  // whether the probe is about an operation
  std::vector<int> ranks;  // world ranks that are probed
  std::string what;        // "allreduce 'grads' (f32[8], SUM, seq 7)"
};

// The reply of one rank to a probe, if the reply has arrived (`answered`).
struct ProbeReply {
  int rank = -1;     // its world rank
  std::string host;  // empty if unknown
  bool asked = false, answered = false;
  bool entered = false;  // the rank has made the call
  std::string text;      // "its last call was ...; it is at train.py:41 in load_batch"
};

// The reply of this rank to a straggler probe: its current wait, or its last call.
struct CallTrace {
  bool has_text = false;  // false if this communicator has nothing to report
  bool waits = false;     // whether the rank is in a call and waits for other ranks
  int waits_for = -1;     // if `waits`: one of these ranks of the world, if known
  std::chrono::steady_clock::time_point when;  // end of the last call, or now
  std::string text;  // "its last call was allgather 'x' (seq 6)"
};

// Sends probes and collects the replies. Implemented by ProbeSender. Thread-safe.
class StragglerProbe {
 public:
  virtual ~StragglerProbe() = default;
  // Sends the probes and does not wait for replies. A probe about a call discards all
  // earlier replies of the communicator. A probe about an operation is not sent to a
  // rank that was probed less than half a second ago.
  virtual void SendProbes(const ProbeRequest& request) = 0;
  // Returns the replies to the last probe of each rank, in the order of `ranks`.
  virtual std::vector<ProbeReply> ProbeReplies(int communicator,
                                               const std::vector<int>& ranks) const = 0;
};

inline constexpr size_t kMaxProbed = 64;  // ranks that one call or operation probes
inline constexpr size_t kMaxReplies = 3;  // replies in one text
inline constexpr size_t kMaxReplyBytes = 300;  // bytes of a reply

// Returns "rank 3 on node-b", or "rank 3" if the host is unknown.
std::string Title(const ProbeReply& reply);
// Returns the text of the reply, "it does not answer" if there is no reply, or "" if
// the rank was not probed.
std::string ReplyText(const ProbeReply& reply);
bool AllAnswered(const std::vector<ProbeReply>& replies);

// Makes a text of another process safe to print: replaces control characters, and cuts
// the text to `limit` bytes, but not within a character.
std::string Printable(std::string_view text, size_t limit);

// Decides when a waiting rank sends probes, prints warnings, and stops waiting for
// replies. All times are seconds since the wait began. A `warning` or `limit` of 0
// means no warning or no limit.
class StallPolicy {
 public:
  // Returns whether to send probes now, and records that they were sent. True once for
  // each warning, and once shortly before the limit, so that the error contains
  // replies.
  bool MustProbe(double seconds, double warning, double limit);
  // Returns whether to stop waiting for replies, because all have arrived (`answered`)
  // or kReplyTimeout seconds have passed.
  bool DoneWaiting(double seconds, bool answered) const {
    return probed_ < 0 || answered || seconds >= probed_ + kReplyTimeout;
  }
  // Returns true at `warning`, and then whenever the wait has doubled since the last
  // warning.
  bool MustWarn(double seconds, double warning) const {
    return warning > 0 && seconds >= warning && seconds >= 2 * warned_;
  }
  void Warned(double seconds) { warned_ = seconds; }

 private:
  static constexpr double kReplyTimeout = 0.7, kEarly = 1.0;  // durations in seconds
  double probed_ = -1;  // seconds of the wait at the last probe, -1 if none was sent
  double warned_ = 0;   // seconds of the wait at the last warning, 0 if there was none
  double last_ = 0;     // seconds of the wait at the last MustProbe
};

}  // namespace ringjax
