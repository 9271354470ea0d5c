// Heartbeat: one thread that knows which peers of the world live, and says so.
//
// It watches one connected, authenticated socket per peer: a closed one means that the
// process is gone (milliseconds), silence that it hangs or the network is cut. A peer
// that fails says why before it goes, and names the rank that it lost itself, so that a
// cascade still names the first culprit. Each beat carries how many world calls the
// rank has entered, which is how a stall names the rank that did not call.
//
// It also carries questions: who waits long for a rank asks where it is. The thread
// itself answers what the core knows, however busy the interpreter is; where the
// program is, somebody with the interpreter says, who is rung and has a moment for it.
//
// In an elastic job somebody else decides what follows from a loss; he is rung. There a
// rank that a communicator blames counts as lost.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "base/status.h"
#include "engine/call/owner.h"
#include "engine/communicator/communicator.h"
#include "engine/communicator/farewell.h"
#include "engine/communicator/inquiry.h"
#include "engine/recorder/recorder.h"
#include "transport/channel.h"
#include "transport/link.h"

namespace ringjax {

// How long a rank waited in a call of the world for the others.
struct Waited {
  uint32_t sequence = 0;  // the low bits of the call's
  bool named = false;     // of the eager lane, where several may have one sequence
  uint32_t us = 0;
};
// What a rank has told of its waiting, in all and lately.
struct Waits {
  uint64_t calls = 0;
  double wait_seconds = 0, move_seconds = 0;
  std::vector<Waited> latest;
  std::string place;  // where its program was seen last
};
// What the clock of another rank showed when ours showed `when`, in seconds.
struct ClockReading {
  int rank = 0;
  double when = 0, ahead = 0;  // of ours, by so much
  double trip = 0;             // there and back; half of it is the most of an error
};
// Of a recorder's calls those after `*seen`, which is moved on; the newest, if too
// many.
std::vector<Waited> WaitsSince(const Recorder& recorder, uint64_t* seen, size_t most);

class Heartbeat : public Inquiry,
                  public Farewell,
                  public std::enable_shared_from_this<Heartbeat> {
 public:
  struct Peer {
    int rank;               // in the world
    int fd;                 // connected stream socket; owned from here on
    std::string host = {};  // its name, for texts
    std::string key = {};   // of its channel; empty: plain
  };

  // Times in seconds. `wakeup` is an eventfd of its own. `notify` is rung whenever
  // lost() or left() grows; null: the job is not elastic. `inquire` is rung when
  // somebody asks where the program is; null: nobody here knows.
  Heartbeat(int rank, std::vector<Peer> peers, double interval, double timeout,
            std::unique_ptr<Doorbell> wakeup,
            std::unique_ptr<Doorbell> notify = nullptr,
            std::unique_ptr<Doorbell> inquire = nullptr);
  ~Heartbeat() override;
  void Stop();  // ends the thread and closes the sockets; at most once has an effect

  // A lost member aborts the communicator from now on, at once if one is lost already.
  void Watch(const std::shared_ptr<Communicator>& communicator);
  void Forget(const Communicator* communicator);

  // Tells all peers that this rank fails and why. `culprit` is the world rank to blame
  // and `message` what it did; -1 blames this rank, unless it lost another one before.
  void Fail(const std::string& message, int culprit = -1);
  // Tells all peers that this rank leaves in good order.
  void Leave();

  std::vector<std::pair<int, std::string>> lost() const;
  std::vector<int> left() const;  // in good order

  // Questions of this rank (questions.cc).
  void Ask(const Question& question) override;
  std::vector<Sighting> Sightings(int communicator,
                                  const std::vector<int>& ranks) const override;

  // Letting go (letting_go.cc).
  void LetGo(int communicator, uint32_t epoch) override;
  std::vector<int> Holding(int communicator, uint32_t epoch,
                           const std::vector<int>& ranks) const override;

  // Waits (waits.cc). From now on this rank's go to the first rank with each beat;
  // null: no more. Where its program is goes with them.
  void ShareWaits(std::shared_ptr<Recorder> recorder);
  void SayWhere(const std::string& place);
  // What the peers have told since the last time, by rank.
  std::map<int, Waits> TakeWaits();

  // Clocks (clocks.cc). Asks the first rank so often what its clock shows, one question
  // after the other; the first rank asks nobody.
  void AskClock(int times);
  std::vector<ClockReading> TakeClocks();  // the answers since the last time

  // For who was rung: the questions to this rank that wait for an answer.
  struct Asked {
    uint64_t newest = 0;              // its number; 0: there is none
    std::vector<std::string> stalls;  // "rank 0 waits for allreduce 'x' (...)", once
  };
  Asked asked();
  // Where the program is, as of the question of that number: "it is at train.py:41".
  void Answer(uint64_t newest, const std::string& place);

 private:
  enum class Type : uint8_t {
    kBeat = 1,
    kFail,
    kLeave,
    kAsk,
    kAnswer,
    kLetGo,
    kWaits,
    kClock
  };
  struct Message {  // on the wire, followed by `length` bytes of text
    uint32_t magic = 0x42484752;
    Type type = Type::kBeat;
    uint8_t pad[3] = {};
    int32_t culprit = -1;
    uint32_t length = 0;
    uint64_t entered[2] = {};  // calls of the world: tensors on hosts, on devices
  };
  static constexpr size_t kMostText = 1024;  // bytes
  struct AskHead {  // of the text of kAsk, which goes on with what is waited for
    uint64_t sequence = 0;
    int32_t communicator = 0;
    uint32_t token = 0;  // of the asker
    uint32_t operation = 0, pad = 0;
  };
  struct Finished {  // the text of kLeave: how many calls there were, for each
    int32_t communicator = 0;
    uint32_t pad = 0;
    uint64_t calls = 0;
  };
  struct Gone {  // the text of kLetGo
    int32_t communicator = 0;
    uint32_t epoch = 0;
  };
  struct WaitsHead {  // of the text of kWaits; then pairs of numbers, then a place
    uint32_t count = 0, pad = 0;
    uint64_t calls = 0;
    double wait = 0, move = 0;
  };
  struct ClockText {  // the text of kClock, in seconds; a question has the first only
    double asked = 0, came = 0, answered = 0;
  };
  static constexpr size_t kMostClocks = 256;  // readings, until somebody takes them
  static constexpr size_t kMostGone = 4096;   // communicators of a peer
  struct AnswerHead {  // of the text of kAnswer, which goes on with the report
    uint32_t token = 0, entered = 0;
  };

  // This rank has asked a peer.
  struct Inquired {
    uint32_t token = 0;
    double when = 0;  // seconds, on our clock
    bool answered = false, entered = false;
    std::string text;
  };
  struct State;
  // A peer has asked, and what the interpreter knows is awaited.
  struct Open {
    State* asker = nullptr;
    uint64_t number = 0;
    AskHead head;
    double until = 0;
    std::string what;
  };

  struct State {
    explicit State(const Peer& p) : peer(p), channel(p.fd, KeyOf(p.key)) {
      peer.key.clear();
    }
    Peer peer;
    Channel channel;
    std::string input;   // bytes of an incomplete message, at most one message
    std::string output;  // the rest of a message that was begun
    double heard = 0;    // seconds, on our clock
    uint64_t entered[2] = {};
    bool open = true, left = false;
    std::map<int, uint64_t> finished;  // if it has left: calls, by communicator
    std::map<int, Inquired> inquired;  // by communicator
    std::map<int, uint32_t> gone;      // let go: the last epoch, by communicator
    Waits waits;
  };

  void Expect();
  void WorkOn();
  void Work();
  double Now() const;
  void Beat();
  void ReadFrom(State* state);
  bool Parse(State* state);
  bool Sensible(const Message& message) const;
  void CheckSilence();
  void Lose(int rank, const std::string& why);
  void OnLeave(State* state, const std::string& text);
  std::vector<std::shared_ptr<Communicator>> WatchedWith(int rank) const;
  void Close(State* state);
  void Tell(Type type, int culprit, const std::string& text);
  void Write(State* state, const std::string& message, int limit_ms);
  std::string Bytes(Type type, int culprit, std::string_view text) const;
  std::vector<int> Laggards(int plane, uint64_t sequence) const;

  // Questions.
  double NextAnswer() const;  // when the first one must be given
  void OnAsk(State* state, const std::string& text);
  void OnAnswer(State* state, const std::string& text);
  void OnLetGo(State* state, const std::string& text);
  void OnWaits(State* state, const std::string& text);
  void TellWaits();
  void OnClock(State* state, const std::string& bytes);
  void SendClock(State* state);  // with mutex_ held
  void AnswerWhatIsDue();
  void Reply(State* state, const AskHead& head, const std::string& place);
  std::shared_ptr<Communicator> Watched(int id) const;
  std::string OwnTrace() const;
  void Send(State* state, Type type, std::string_view text);  // with mutex_ held

  const Owner owner_;
  const int rank_;
  const double interval_, timeout_;
  const std::unique_ptr<Doorbell> wakeup_, notify_, inquire_;
  int ready_ = -1;               // an epoll: what one wake costs is not for each peer
  mutable std::mutex mutex_;     // guards all below; never held while aborting
  std::vector<State> states_;    // of all peers, from the first to the last moment
  std::vector<Open> questions_;  // to this rank, oldest first
  std::vector<std::pair<int, std::string>> lost_;
  std::vector<std::weak_ptr<Communicator>> watched_;
  std::shared_ptr<Recorder> recorder_;  // whose waits are told, or null
  uint64_t shared_ = 0;                 // of its calls, those that were told
  std::string where_;
  std::vector<ClockReading> clocks_;
  int clocks_left_ = 0;     // questions still to be asked
  double clock_asked_ = 0;  // when the last one was
  double last_look_ = 0;
  uint32_t token_ = 0;     // of the last own question
  uint64_t question_ = 0;  // number of the last one to us
  uint64_t placed_ = 0;    // up to here `place_` is known
  std::string place_;
  std::vector<std::pair<int, uint64_t>> told_;  // stalls that asked() has named
  bool stopping_ = false;
  std::thread worker_;
};

}  // namespace ringjax
