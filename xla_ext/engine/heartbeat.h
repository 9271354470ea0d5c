// Heartbeat: one thread that knows which peers of the world live, and says so.
//
// It watches one connected, authenticated socket per peer: a closed one means that the
// process is gone (milliseconds), silence that it hangs or the network is cut. A peer
// that fails says why before it goes, and names the rank that it lost itself, so that a
// cascade still names the first culprit. Each beat carries how many world calls the
// rank has entered, which is how a stall names the rank that did not call.
//
// In an elastic job somebody else decides what follows from a loss; he is rung. There a
// rank that a communicator blames counts as lost.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/status.h"
#include "engine/communicator.h"
#include "engine/owner.h"
#include "transport/link.h"

namespace ringjax {

class Heartbeat : public std::enable_shared_from_this<Heartbeat> {
 public:
  struct Peer {
    int rank;  // in the world
    int fd;    // connected stream socket; owned from here on
  };

  // Times in seconds. `wakeup` is an eventfd of its own. `notify` is rung whenever
  // lost() or left() grows; null: the job is not elastic.
  Heartbeat(int rank, std::vector<Peer> peers, double interval, double timeout,
            std::unique_ptr<Doorbell> wakeup,
            std::unique_ptr<Doorbell> notify = nullptr);
  ~Heartbeat();
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

 private:
  enum class Type : uint8_t { kBeat = 1, kFail, kLeave };
  struct Message {  // on the wire, followed by `length` bytes of text
    uint32_t magic = 0x42484752;
    Type type = Type::kBeat;
    uint8_t pad[3] = {};
    int32_t culprit = -1;
    uint32_t length = 0;
    uint64_t entered[2] = {};  // calls of the world: tensors on hosts, on devices
  };
  static constexpr size_t kMostText = 1024;  // bytes

  struct State {
    Peer peer;
    std::string input;  // bytes of an incomplete message, at most one message
    double heard = 0;   // seconds, on our clock
    uint64_t entered[2] = {};
    bool open = true, left = false;
  };

  void WorkOn();
  void Work();
  double Now() const;
  void Beat();
  void ReadFrom(State* state);
  bool Parse(State* state);
  bool Sensible(const Message& message) const;
  void CheckSilence();
  void Lose(int rank, const std::string& why);
  void Left(int rank);
  std::vector<std::shared_ptr<Communicator>> WatchedWith(int rank) const;
  void Close(State* state);
  void Tell(Type type, int culprit, const std::string& text);
  std::vector<int> Laggards(int plane, uint64_t sequence) const;

  const Owner owner_;
  const int rank_;
  const double interval_, timeout_;
  const std::unique_ptr<Doorbell> wakeup_, notify_;
  mutable std::mutex mutex_;  // guards all below; never held while aborting
  std::vector<State> states_;
  std::vector<std::pair<int, std::string>> lost_;
  std::vector<std::weak_ptr<Communicator>> watched_;
  double last_look_ = 0;
  bool stopping_ = false;
  std::thread worker_;
};

}  // namespace ringjax
