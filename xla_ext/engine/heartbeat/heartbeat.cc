// The heartbeat thread. See heartbeat.h; straggler probes are in questions.cc.
#include "engine/heartbeat/heartbeat.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstring>
#include <exception>
#include <span>
#include <system_error>
#include <tuple>

namespace ringjax {
namespace {

// The index in Message::entered for calls of this communicator: 0 for the world, 1 for
// its control communicator (tensors on CUDA devices), -1 for all others.
int PlaneOf(const Communicator& c) {
  return c.id() == 0 ? 0 : c.id() == kWorldControl ? 1 : -1;
}

}  // namespace

Heartbeat::Heartbeat(int rank, std::vector<Peer> peers, double interval, double timeout,
                     std::unique_ptr<Doorbell> wakeup, std::unique_ptr<Doorbell> notify,
                     std::unique_ptr<Doorbell> inquire)
    : rank_(rank),
      interval_(interval),
      timeout_(timeout),
      wakeup_(std::move(wakeup)),
      notify_(std::move(notify)),
      inquire_(std::move(inquire)) {
  for (const Peer& peer : peers) {
    fcntl(peer.fd, F_SETFL, fcntl(peer.fd, F_GETFL) | O_NONBLOCK);
    State& state = states_.emplace_back(peer);
    state.heard = Now();
  }
  last_look_ = Now();
  try {
    Expect();
    worker_ = std::thread([this] { WorkOn(); });
  } catch (...) {
    for (State& state : states_) Close(&state);
    if (ready_ >= 0) close(ready_);
    throw;
  }
}

// Registers the doorbell and all sockets with epoll. Close must deregister a socket
// explicitly: a closed socket stays registered while a forked child has a copy of it.
void Heartbeat::Expect() {
  const auto check = [](int result) {
    if (result < 0) throw std::system_error(errno, std::generic_category(), "epoll");
  };
  check(ready_ = epoll_create1(EPOLL_CLOEXEC));
  const auto add = [&](int fd, State* state) {
    epoll_event event{EPOLLIN, {.ptr = state}};
    check(epoll_ctl(ready_, EPOLL_CTL_ADD, fd, &event));
  };
  add(wakeup_->fd(), nullptr);
  for (State& state : states_) add(state.peer.fd, &state);
}

Heartbeat::~Heartbeat() {
  if (owner_.IsHere()) {
    Stop();
  } else {
    // A forked child has no such thread, so the std::thread can be neither joined nor
    // destroyed: leak it.
    [[maybe_unused]] auto* left_behind = new std::thread(std::move(worker_));
    // The child may have closed the descriptors and used their numbers again.
    for (State& state : states_) state.channel.Release();
  }
  close(ready_);
}

void Heartbeat::Stop() {
  {
    std::lock_guard lock(mutex_);
    if (stopping_) return;
    stopping_ = true;
  }
  wakeup_->Ring();
  worker_.join();
  std::lock_guard lock(mutex_);
  for (State& state : states_) Close(&state);
}

double Heartbeat::Now() const {
  return std::chrono::duration<double>(Clock::now().time_since_epoch()).count();
}

// Runs Work until Stop, and again after an exception: out of memory must not end it.
void Heartbeat::WorkOn() {
  while (true) {
    try {
      return Work();
    } catch (const std::exception&) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
  }
}

void Heartbeat::Work() {
  double next_beat = Now();
  std::array<epoll_event, 64> events;
  while (true) {
    {
      std::lock_guard lock(mutex_);
      if (stopping_) return;
    }
    const double next = std::min(next_beat, NextAnswer());
    const double wait = std::clamp(next - Now(), 0.0, interval_);
    const int n = epoll_wait(ready_, events.data(), static_cast<int>(events.size()),
                             static_cast<int>(wait * 1000) + 1);
    for (const epoll_event& event : std::span(events).first(n > 0 ? n : 0)) {
      auto* state = static_cast<State*>(event.data.ptr);
      if (state == nullptr) {
        wakeup_->Drain();
        continue;
      }
      do {
        ReadFrom(state);
      } while (state->open && state->channel.readable());
    }
    AnswerWhatIsDue();
    if (Now() >= next_beat) {
      Beat();
      TellWaits();
      CheckSilence();
      // All ranks of a host beat at the same time: a wake finds many messages at once.
      next_beat = (std::floor(Now() / interval_) + 1) * interval_;
    }
  }
}

void Heartbeat::Beat() { Tell(Type::kBeat, -1, ""); }

// With mutex_ held.
std::string Heartbeat::Bytes(Type type, int culprit, std::string_view text) const {
  Message message;
  message.type = type;
  message.culprit = culprit;
  message.length = static_cast<uint32_t>(text.size());
  for (const auto& weak : watched_)
    if (auto c = weak.lock(); c && PlaneOf(*c) >= 0)
      message.entered[PlaneOf(*c)] = c->entered();
  std::string bytes(reinterpret_cast<const char*>(&message), sizeof message);
  return bytes.append(text);
}

void Heartbeat::Send(State* state, Type type, std::string_view text) {
  if (state->open) Write(state, Bytes(type, -1, text), 0);
}

// Sends the rest of an earlier message, and then `message`. Gives up once the peer has
// accepted no bytes for `limit_ms`: drops a message of which no byte was sent, and
// keeps the rest of any other for the next Write, because the stream must stay intact.
void Heartbeat::Write(State* state, const std::string& message, int limit_ms) {
  std::string& bytes = state->output;
  const size_t before = bytes.size();
  bytes += message;
  size_t sent = 0;
  while (sent < bytes.size() || state->channel.pending()) {
    const iovec rest{bytes.data() + sent, bytes.size() - sent};
    const ssize_t n =
        rest.iov_len > 0 ? state->channel.Send({&rest, 1}) : state->channel.Flush();
    if (n > 0) {
      if (rest.iov_len > 0) sent += static_cast<size_t>(n);
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      pollfd p{state->channel.fd(), POLLOUT, 0};
      if (limit_ms <= 0 || poll(&p, 1, limit_ms) <= 0) break;
    } else if (errno != EINTR) {
      break;
    }
  }
  if (sent <= before) bytes.resize(before);
  bytes.erase(0, sent);
}

void Heartbeat::Tell(Type type, int culprit, const std::string& text) {
  std::lock_guard lock(mutex_);
  const std::string bytes = Bytes(type, culprit, Cut(text, kMostText));
  for (State& state : states_)
    if (state.open) Write(&state, bytes, type == Type::kBeat ? 0 : 100);
}

void Heartbeat::ReadFrom(State* state) {
  char buffer[4096];
  const iovec piece{buffer, sizeof buffer};
  const ssize_t n = state->channel.Receive({&piece, 1});
  if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return;
  const int rank = state->peer.rank;
  if (n <= 0) {
    const std::string why =
        n == 0 ? "closed its connection (the process ended)"
        : errno == EBADMSG
            ? "sent data that were altered on their way, or are no TLS records"
            : std::strerror(errno);
    bool left;
    {
      std::lock_guard lock(mutex_);
      left = state->left;
      Close(state);
    }
    if (!left) Lose(rank, why);
    return;
  }
  {
    std::lock_guard lock(mutex_);
    state->heard = Now();
  }
  state->input.append(buffer, static_cast<size_t>(n));
  while (state->open && Parse(state)) {
  }
}

// Whether the message is valid: its culprit exists, and its length fits its type.
bool Heartbeat::Sensible(const Message& message) const {
  const bool known =
      message.culprit == -1 || message.culprit == rank_ ||
      std::any_of(states_.begin(), states_.end(), [&message](const State& state) {
        return state.peer.rank == message.culprit;
      });
  return known && message.magic == Message().magic && message.length <= kMostText &&
         message.type >= Type::kBeat && message.type <= Type::kClock &&
         (message.type != Type::kAsk || message.length >= sizeof(AskHead)) &&
         (message.type != Type::kAnswer || message.length >= sizeof(AnswerHead)) &&
         (message.type != Type::kTeardown || message.length >= sizeof(Gone)) &&
         (message.type != Type::kWaits || message.length >= sizeof(WaitsHead)) &&
         (message.type != Type::kClock || message.length >= sizeof(ClockText));
}

// Handles one message of the input. False: none is complete, or it was invalid.
bool Heartbeat::Parse(State* state) {
  Message message;
  if (state->input.size() < sizeof message) return false;
  std::memcpy(&message, state->input.data(), sizeof message);
  const int rank = state->peer.rank;
  if (!Sensible(message)) {
    {
      std::lock_guard lock(mutex_);
      Close(state);
    }
    Lose(rank, "sent garbage on its control connection");
    return false;
  }
  if (state->input.size() < sizeof message + message.length) return false;
  std::string text = state->input.substr(sizeof message, message.length);
  state->input.erase(0, sizeof message + message.length);
  if (message.type == Type::kAsk) OnAsk(state, text);
  if (message.type == Type::kAnswer) OnAnswer(state, text);
  if (message.type == Type::kTeardown) OnTeardown(state, text);
  if (message.type == Type::kWaits) OnWaits(state, text);
  if (message.type == Type::kClock) OnClock(state, text);
  if (message.type == Type::kFail) {
    text = Printable(text, kMostText);
    const bool itself = message.culprit < 0 || message.culprit == rank;
    if (!itself)
      Lose(message.culprit, text);
    else
      Lose(rank, message.culprit == rank ? text : "failed: " + text);
  }
  {
    std::lock_guard lock(mutex_);
    for (int i : {0, 1})
      state->entered[i] = std::max(state->entered[i], message.entered[i]);
  }
  if (message.type == Type::kLeave) OnLeave(state, text);
  return true;
}

void Heartbeat::CheckSilence() {
  std::vector<std::pair<int, double>> silent;
  {
    std::lock_guard lock(mutex_);
    const double now = Now();
    // If this process itself was stopped, the silence of its peers means nothing.
    const bool stood_still = now - last_look_ > interval_ + timeout_ / 2;
    last_look_ = now;
    for (State& state : states_) {
      if (stood_still) state.heard = now;
      if (!state.open || state.left || now - state.heard < timeout_) continue;
      silent.push_back({state.peer.rank, now - state.heard});
      Close(&state);
    }
  }
  for (const auto& [rank, seconds] : silent)
    Lose(rank, "has been silent for " + std::to_string(static_cast<int>(seconds)) +
                   " s (stopped, or the network is cut)");
}

void Heartbeat::Lose(int rank, const std::string& why) {
  {
    std::lock_guard lock(mutex_);
    for (const auto& [known, reason] : lost_)
      if (known == rank) return;
    lost_.push_back({rank, why});
  }
  const Status status(Code::kUnavailable, "rank " + std::to_string(rank) + " " + why,
                      rank);
  for (const auto& c : WatchedWith(rank)) c->Abort(status);
  if (notify_) notify_->Ring();
}

void Heartbeat::OnLeave(State* state, const std::string& text) {
  std::map<int, uint64_t> finished;
  Finished one;
  for (size_t at = 0; at + sizeof one <= text.size(); at += sizeof one) {
    std::memcpy(&one, text.data() + at, sizeof one);
    finished[one.communicator] = one.calls;
  }
  {
    std::lock_guard lock(mutex_);
    state->left = true;
    state->finished = finished;
  }
  const int rank = state->peer.rank;
  for (const auto& c : WatchedWith(rank)) c->OnPeerShutdown(rank, finished[c->id()]);
  if (notify_) notify_->Ring();
}

std::vector<std::shared_ptr<Communicator>> Heartbeat::WatchedWith(int rank) const {
  std::vector<std::shared_ptr<Communicator>> all;
  std::lock_guard lock(mutex_);
  for (const auto& weak : watched_) {
    auto c = weak.lock();
    if (!c) continue;
    const auto& members = c->options().world_ranks;
    if (std::find(members.begin(), members.end(), rank) != members.end())
      all.push_back(std::move(c));
  }
  return all;
}

void Heartbeat::Close(State* state) {
  if (!state->open) return;
  state->open = false;
  if (ready_ >= 0) epoll_ctl(ready_, EPOLL_CTL_DEL, state->channel.fd(), nullptr);
  state->channel.Close();
}

void Heartbeat::Watch(const std::shared_ptr<Communicator>& communicator) {
  // Weak, because a communicator may outlive the heartbeat that watches it.
  std::weak_ptr<Heartbeat> self = weak_from_this();
  HeartbeatHooks hooks;
  hooks.on_failure = [self](const Status& status) {
    if (auto heartbeat = self.lock()) heartbeat->Fail(status.message(), status.rank());
  };
  if (const int plane = PlaneOf(*communicator); plane >= 0)
    hooks.late_ranks = [self, plane](uint64_t sequence) {
      auto heartbeat = self.lock();
      return heartbeat ? heartbeat->LateRanks(plane, sequence) : std::vector<int>{};
    };
  hooks.straggler_probe = self;
  hooks.teardown_barrier = self;
  communicator->heartbeat().SetHooks(std::move(hooks));
  std::vector<std::pair<int, std::string>> lost_before;
  std::map<int, uint64_t> left_before;
  {
    std::lock_guard lock(mutex_);
    watched_.push_back(communicator);
    lost_before = lost_;
    for (const State& state : states_)
      if (state.left) {
        const auto known = state.finished.find(communicator->id());
        left_before[state.peer.rank] =
            known == state.finished.end() ? 0 : known->second;
      }
  }
  const auto& members = communicator->options().world_ranks;
  auto member = [&](int rank) {
    return std::find(members.begin(), members.end(), rank) != members.end();
  };
  for (const auto& [rank, why] : lost_before)
    if (member(rank))
      communicator->Abort(
          Status(Code::kUnavailable, "rank " + std::to_string(rank) + " " + why, rank));
  for (const auto& [rank, finished] : left_before)
    if (member(rank)) communicator->OnPeerShutdown(rank, finished);
}

void Heartbeat::Forget(const Communicator* communicator) {
  std::lock_guard lock(mutex_);
  std::erase_if(watched_, [&](const std::weak_ptr<Communicator>& weak) {
    auto c = weak.lock();
    return !c || c.get() == communicator;
  });
}

void Heartbeat::Fail(const std::string& message, int culprit) {
  std::string what = message;
  if (culprit < 0) {
    std::lock_guard lock(mutex_);
    if (!lost_.empty()) std::tie(culprit, what) = lost_.front();
  }
  Tell(Type::kFail, culprit, what);
  if (notify_ && culprit >= 0 && culprit != rank_) Lose(culprit, what);
}

// A message has room for 64 communicators. For any other one, peers assume that this
// rank has finished no call.
void Heartbeat::Leave() {
  std::string text;
  {
    std::lock_guard lock(mutex_);
    for (const auto& weak : watched_) {
      const auto c = weak.lock();
      if (!c || text.size() + sizeof(Finished) > kMostText) continue;
      const Finished one{c->id(), 0, c->finished()};
      text.append(reinterpret_cast<const char*>(&one), sizeof one);
    }
  }
  Tell(Type::kLeave, -1, text);
}

std::vector<std::pair<int, std::string>> Heartbeat::lost() const {
  std::lock_guard lock(mutex_);
  return lost_;
}

std::vector<int> Heartbeat::left() const {
  std::lock_guard lock(mutex_);
  std::vector<int> ranks;
  for (const State& state : states_)
    if (state.left) ranks.push_back(state.peer.rank);
  return ranks;
}

std::vector<int> Heartbeat::LateRanks(int plane, uint64_t sequence) const {
  std::lock_guard lock(mutex_);
  std::vector<int> ranks;
  for (const State& state : states_)
    if (state.entered[plane] < sequence) ranks.push_back(state.peer.rank);
  return ranks;
}

}  // namespace ringjax
