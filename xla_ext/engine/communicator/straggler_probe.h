// Straggler probes: questions to late ranks about where their programs are.
//
// A rank that waits for long probes the late ranks and continues to wait. The replies
// arrive a moment later and become part of the warning or the error. The heartbeat
// carries probes and replies, because its thread replies however busy the rank is.
// Compiled programs and the eager lane share one policy: StallPolicy.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace ringjax {

// A probe of some ranks about one call, or about one operation of an eager lane.
struct Question {
  int communicator = 0;    // its id
  uint64_t sequence = 0;   // number of the call or operation, equal on all ranks
  bool operation = false;  // `sequence` is the number of an operation
  std::vector<int> ranks;  // world ranks that are probed
  std::string what;        // "allreduce 'grads' (f32[8], SUM, seq 7)"
};

// The reply of one rank to a probe, as far as it has arrived.
struct ProbeReply {
  int rank = -1;     // its world rank
  std::string host;  // empty if unknown
  bool asked = false, answered = false;
  bool entered = false;  // the rank has made the call
  std::string text;      // "its last call was ...; it is at train.py:41 in load_batch"
};

// The reply of this rank to a straggler probe: its current wait, or its last call.
struct ProbeAnswer {
  bool has_text = false;  // false: this communicator has nothing to report
  bool waits = false;     // the rank is in a call and waits for other ranks
  std::chrono::steady_clock::time_point when;
  std::string text;  // "its last call was allgather 'x' (seq 6)"
};

// Sends probes and collects the replies. Implemented by ProbeSender. Thread-safe.
class StragglerProbe {
 public:
  virtual ~StragglerProbe() = default;
  // Sends the probes and does not wait for replies. A probe about a call discards all
  // earlier replies of the communicator. A probe about an operation is not sent to a
  // rank that was probed less than half a second ago.
  virtual void Ask(const Question& question) = 0;
  // The replies to the last probe of each rank, in the order of `ranks`.
  virtual std::vector<ProbeReply> ProbeReplies(int communicator,
                                               const std::vector<int>& ranks) const = 0;
};

// The most ranks that a call or operation probes, and the most replies in one text.
inline constexpr size_t kMostAsked = 64, kMostTold = 3;
inline constexpr size_t kMostReply = 300;  // bytes of a reply

// "rank 3 on node-b", "rank 3".
std::string Title(const ProbeReply& reply);
// Returns the text of the reply, or that the rank does not answer; empty if the rank
// was not probed.
std::string ReplyText(const ProbeReply& reply);
bool AllAnswered(const std::vector<ProbeReply>& replies);

// Makes a text of another process safe to print: replaces control characters, and cuts
// the text to `limit` bytes, but not within a character.
std::string Printable(std::string_view text, size_t limit);

// Decides when a rank that waits probes, warns, and stops waiting for replies. Times
// are seconds of the current wait; a `warning` or `limit` of 0 never comes.
class StallPolicy {
 public:
  // Whether to probe now, and if so, remembers that. True once for each warning, and
  // once shortly before the limit, so that the error contains the replies.
  bool MustAsk(double seconds, double warning, double limit);
  // Whether to stop waiting for replies: all have come (`answered`), or time is up.
  bool Settled(double seconds, bool answered) const {
    return asked_ < 0 || answered || seconds >= asked_ + kForAnswers;
  }
  // True at `warning`, and then whenever the wait is twice as long as at the last one.
  bool MustWarn(double seconds, double warning) const {
    return warning > 0 && seconds >= warning && seconds >= 2 * warned_;
  }
  void Warned(double seconds) { warned_ = seconds; }

 private:
  static constexpr double kForAnswers = 0.7, kEarly = 1.0;  // durations in seconds
  // Seconds of the wait at the last probe (-1: none), the last warning (0: none) and
  // the last MustAsk.
  double asked_ = -1, warned_ = 0, last_ = 0;
};

}  // namespace ringjax
