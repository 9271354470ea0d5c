// Asking late ranks where they are.
//
// Whoever waits long asks through this and goes on waiting; what the others answer is
// there a moment later, for a warning or an error. The heartbeat carries both: it lives
// where nothing else of a rank may. When to ask and how long to wait for answers is
// the same for compiled programs and for the eager lane: Patience.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace ringjax {

struct Question {
  int communicator = 0;    // its id
  uint64_t sequence = 0;   // of the call; or of the operation, alike on all ranks
  bool operation = false;  // of an eager lane, which numbers operations, not calls
  std::vector<int> ranks;  // of the world
  std::string what;        // "allreduce 'grads' (f32[8], SUM, seq 7)"
};

// What is known of a rank that was asked.
struct Sighting {
  int rank = -1;     // of the world
  std::string host;  // empty if unknown
  bool asked = false, answered = false;
  bool entered = false;  // it has made the call
  std::string text;      // "its last call was ...; it is at train.py:41 in load_batch"
};

class Inquiry {
 public:
  virtual ~Inquiry() = default;
  // Returns at once. Of operations, who was asked a moment ago is not asked again.
  virtual void Ask(const Question& question) = 0;
  // What they have said since they were asked last, in the order of `ranks`.
  virtual std::vector<Sighting> Sightings(int communicator,
                                          const std::vector<int>& ranks) const = 0;
};

// Nobody asks more ranks than that at once, nor says more of what they answer.
inline constexpr size_t kMostAsked = 64, kMostTold = 3;
inline constexpr size_t kMostSighting = 300;  // bytes of an answer

// "rank 3 on node-b", "rank 3".
std::string Title(const Sighting& sighting);
// What it has said, or that it has said nothing; empty: it was not asked.
std::string Tale(const Sighting& sighting);
bool AllAnswered(const std::vector<Sighting>& sightings);

// Text of another process, so that it can be printed: no control characters, at most
// `limit` bytes, not ending within a character.
std::string Printable(std::string_view text, size_t limit);

// When to ask, to warn and to give up, of somebody who waits for something. Times are
// seconds of waiting so far; limits of 0 never come.
class Patience {
 public:
  // Whether it is time to ask (again): at the warning, and a little before the limit,
  // so that the error has the answers.
  bool MustAsk(double seconds, double warning, double limit);
  // Whether everybody has answered who will: `answered`, or enough time has passed.
  bool Settled(double seconds, bool answered) const {
    return asked_ < 0 || answered || seconds >= asked_ + kForAnswers;
  }
  bool MustWarn(double seconds, double warning) const {
    return warning > 0 && seconds >= warning && seconds >= 2 * warned_;
  }
  void Warned(double seconds) { warned_ = seconds; }

 private:
  static constexpr double kForAnswers = 0.7, kEarly = 1.0;  // seconds
  double asked_ = -1, warned_ = 0, last_ = 0;
};

}  // namespace ringjax
