// Heartbeat: one thread that detects lost peers of the world, and shows them that this
// rank is alive.
//
// The thread watches one connected, authenticated socket per peer. A closed socket
// means that the process is gone (known within milliseconds), silence that the process
// hangs or the network is cut. A rank that fails sends the reason, and the rank that it
// has lost itself, so a cascade of failures still names the first culprit. Each beat
// carries the number of world calls that the rank has entered: it shows the late ranks.
//
// The sockets also carry straggler probes. The heartbeat thread replies with the state
// of the core, however busy the interpreter is. The position of the program comes from
// a Python thread, which is woken through `inquire` and has half a second to answer.
//
// In an elastic job a rank that a communicator blames counts as lost, too. Each loss
// rings `notify`; the coordinator decides about the next epoch.
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
#include "engine/communicator/straggler_probe.h"
#include "engine/communicator/teardown_barrier.h"
#include "engine/recorder/recorder.h"
#include "transport/channel.h"
#include "transport/link.h"

namespace ringjax {

// How long a rank waited for the other ranks in one call of the world.
struct Waited {
  uint32_t sequence = 0;  // low 32 bits of the sequence number of the call
  bool named = false;     // eager lane, where several operations may be one call
  uint32_t us = 0;        // microseconds
};
// The waits that a peer has reported.
struct Waits {
  uint64_t calls = 0;  // totals of the peer
  double wait_seconds = 0, move_seconds = 0;
  std::vector<Waited> latest;  // since the last TakeWaits, oldest first
  std::string place;           // where its program is, from SayWhere
};
// A comparison of the clock of another rank with the clock of this rank, in seconds.
struct ClockReading {
  int rank = 0;
  double when = 0, ahead = 0;  // own clock at the reply; lead of the other clock
  double trip = 0;             // round trip; half of it is the largest possible error
};
// Returns the newest `most` waits of world calls that have not failed and come after
// the first `*seen` recorded calls. Sets `*seen` to the number of recorded calls.
std::vector<Waited> WaitsSince(const Recorder& recorder, uint64_t* seen, size_t most);

// Thread-safe. Must be owned by a shared_ptr: communicators hold weak references.
class Heartbeat : public StragglerProbe,
                  public TeardownBarrier,
                  public std::enable_shared_from_this<Heartbeat> {
 public:
  struct Peer {
    int rank;               // in the world
    int fd;                 // connected stream socket; the heartbeat takes it
    std::string host = {};  // name of its host, for texts
    std::string key = {};   // for the channel; empty: not encrypted
  };

  // Starts the thread. `interval`: seconds between beats; `timeout`: seconds of silence
  // until a peer is lost. `wakeup` is an eventfd that nothing else uses. `notify` is
  // rung whenever lost() or left() grows; null: the job is not elastic. `inquire` is
  // rung when a peer probes this rank; null: probes are answered without the position
  // of the program. Throws std::system_error.
  Heartbeat(int rank, std::vector<Peer> peers, double interval, double timeout,
            std::unique_ptr<Doorbell> wakeup,
            std::unique_ptr<Doorbell> notify = nullptr,
            std::unique_ptr<Doorbell> inquire = nullptr);
  ~Heartbeat() override;
  void Stop();  // ends the thread and closes the sockets; only the first call counts

  // Aborts the communicator from now on when a member is lost, at once if one is lost
  // already, and sets its hooks.
  void Watch(const std::shared_ptr<Communicator>& communicator);
  void Forget(const Communicator* communicator);

  // Announces to all peers that this rank fails, and why. `culprit` is the world rank
  // to blame and `message` what it did. -1 blames this rank; if it has lost another
  // rank before, peers receive that rank and its reason instead.
  void Fail(const std::string& message, int culprit = -1);
  // Announces to all peers that this rank shuts down in good order.
  void Leave();

  std::vector<std::pair<int, std::string>> lost() const;  // world ranks and reasons
  std::vector<int> left() const;  // world ranks that have shut down in good order

  // Straggler probes that this rank sends (questions.cc).
  void Ask(const Question& question) override;
  std::vector<ProbeReply> ProbeReplies(int communicator,
                                       const std::vector<int>& ranks) const override;

  // The teardown barrier (teardown.cc).
  void AnnounceTeardown(int communicator, uint32_t epoch) override;
  std::vector<int> NotReady(int communicator, uint32_t epoch,
                            const std::vector<int>& ranks) const override;

  // Waits (waits.cc). Sends the waits of this rank, and the text of SayWhere, to the
  // first rank with each beat from now on; null: stops that.
  void ShareWaits(std::shared_ptr<Recorder> recorder);
  void SayWhere(const std::string& place);
  // Takes the reports of the peers, by rank: totals, and the waits since the last call.
  std::map<int, Waits> TakeWaits();

  // Clocks (clocks.cc). Requests the clock of the first rank `times` times, each time
  // after the reply to the last request. Has no effect on the first rank.
  void AskClock(int times);
  std::vector<ClockReading> TakeClocks();  // the readings since the last TakeClocks

  // The probes from peers that wait for Answer, for the thread that `inquire` wakes.
  struct Asked {
    uint64_t newest = 0;  // number of the newest probe; 0: there is none
    // "rank 0 waits for this rank to call allreduce 'x' (...)"; each stall only once.
    std::vector<std::string> stalls;
  };
  Asked asked();
  // Answers the probes up to number `newest`. `place`: "it is at train.py:41".
  void Answer(uint64_t newest, const std::string& place);

 private:
  enum class Type : uint8_t {
    kBeat = 1,
    kFail,
    kLeave,
    kAsk,
    kAnswer,
    kTeardown,
    kWaits,
    kClock
  };
  struct Message {  // on the wire; `length` bytes of text follow
    uint32_t magic = 0x42484752;
    Type type = Type::kBeat;
    uint8_t pad[3] = {};
    int32_t culprit = -1;
    uint32_t length = 0;
    uint64_t entered[2] = {};  // entered calls: world, its control communicator
  };
  static constexpr size_t kMostText = 1024;  // bytes
  struct AskHead {  // begins the text of kAsk; the title of the stalled call follows
    uint64_t sequence = 0;
    int32_t communicator = 0;
    uint32_t token = 0;  // chosen by the sender, returned with the reply
    uint32_t operation = 0, pad = 0;
  };
  struct Finished {  // the text of kLeave is a list of them, one per communicator
    int32_t communicator = 0;
    uint32_t pad = 0;
    uint64_t calls = 0;
  };
  struct Gone {  // the text of kTeardown
    int32_t communicator = 0;
    uint32_t epoch = 0;
  };
  struct WaitsHead {  // begins the text of kWaits; `count` waits and `place` follow
    uint32_t count = 0, pad = 0;
    uint64_t calls = 0;
    double wait = 0, move = 0;
  };
  struct ClockText {  // the text of kClock, in seconds; a request has only `asked`
    double asked = 0, came = 0, answered = 0;
  };
  static constexpr size_t kMostClocks = 256;  // readings kept until TakeClocks
  static constexpr size_t kMostGone = 4096;   // communicators kept for each peer
  struct AnswerHead {  // begins the text of kAnswer; the reply in words follows
    uint32_t token = 0, entered = 0;
  };

  // A probe that this rank has sent to a peer, and the reply.
  struct Inquired {
    uint32_t token = 0;
    double when = 0;  // sent at, in seconds of Now
    bool answered = false, entered = false;
    std::string text;
  };
  struct State;
  // A probe from a peer that waits for Answer.
  struct Open {
    State* asker = nullptr;
    uint64_t number = 0;
    AskHead head;
    double until = 0;  // latest time of the reply
    std::string what;
  };

  // One peer. Only the heartbeat thread uses `input` and receives.
  struct State {
    explicit State(const Peer& p) : peer(p), channel(p.fd, KeyOf(p.key)) {
      peer.key.clear();
    }
    Peer peer;
    Channel channel;
    std::string input;   // bytes of an incomplete message, at most one message
    std::string output;  // unsent rest of a message that was begun
    double heard = 0;    // last bytes received at, in seconds of Now
    uint64_t entered[2] = {};
    bool open = true, left = false;
    std::map<int, uint64_t> finished;  // if it has left: calls, by communicator
    std::map<int, Inquired> inquired;  // the last probe, by communicator
    std::map<int, uint32_t> gone;      // ready for teardown: epoch, by communicator
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
  std::vector<int> LateRanks(int plane, uint64_t sequence) const;

  double NextAnswer() const;  // when the next reply to a probe is due; or infinity
  void OnAsk(State* state, const std::string& text);
  void OnAnswer(State* state, const std::string& text);
  void OnTeardown(State* state, const std::string& text);
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
  int ready_ = -1;  // epoll of all sockets: the cost of a wake does not grow with them
  // Guards all below. Never held in Communicator::Abort, whose lock comes before it.
  mutable std::mutex mutex_;
  std::vector<State> states_;    // all peers; never resized, since epoll has pointers
  std::vector<Open> questions_;  // probes from peers, oldest first
  std::vector<std::pair<int, std::string>> lost_;
  std::vector<std::weak_ptr<Communicator>> watched_;
  std::shared_ptr<Recorder> recorder_;  // source of the waits that are sent, or null
  uint64_t shared_ = 0;                 // number of its calls that were sent
  std::string where_;
  std::vector<ClockReading> clocks_;
  int clocks_left_ = 0;     // requests that are still to be sent
  double clock_asked_ = 0;  // when the last request was sent
  double last_look_ = 0;    // when CheckSilence ran last
  uint32_t token_ = 0;      // token of the last probe that this rank has sent
  uint64_t question_ = 0;   // number of the last probe from a peer
  uint64_t placed_ = 0;     // `place_` answers the probes up to this number
  std::string place_;
  std::vector<std::pair<int, uint64_t>> told_;  // stalls that asked() has returned
  bool stopping_ = false;
  std::thread worker_;
};

}  // namespace ringjax
