// The heartbeat thread. See heartbeat.h.
#include "engine/heartbeat/heartbeat.h"

#include <sys/epoll.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstring>
#include <exception>
#include <map>
#include <mutex>
#include <span>
#include <tuple>

namespace ringjax {

Heartbeat::Heartbeat(int rank, std::vector<std::string> hosts,
                     std::vector<Peer> neighbours, double interval, double timeout,
                     std::unique_ptr<EventFd> wakeup, std::unique_ptr<EventFd> notify,
                     std::unique_ptr<EventFd> inquire)
    : interval_(interval),
      timeout_(timeout),
      wakeup_(std::move(wakeup)),
      notify_(std::move(notify)),
      connections_(rank, std::move(hosts), neighbours, *wakeup_, &watched_),
      clock_offsets_(&connections_, timeout),
      probe_sender_(&connections_),
      probe_responder_(&connections_, &watched_, wakeup_.get(), std::move(inquire)),
      teardown_announcements_(&connections_),
      wait_reports_(&connections_) {
  last_look_ = SecondsNow();
  try {
    worker_ = std::thread([this] { RunThread(); });
  } catch (...) {
    connections_.CloseAll();
    throw;
  }
}

Heartbeat::~Heartbeat() {
  if (owner_.IsHere()) {
    Stop();
  } else {
    // A forked child has no heartbeat thread, so worker_ can be neither joined nor
    // destroyed, and is leaked.
    [[maybe_unused]] auto* left_behind = new std::thread(std::move(worker_));
    // Release closes no descriptor, because the child may have closed these descriptors
    // already and reused their numbers.
    connections_.Release();
  }
}

void Heartbeat::Stop() {
  // A forked child has no heartbeat thread to join, and must not close the sockets.
  if (!owner_.IsHere()) return;
  EndThread();
  std::lock_guard lock(connections_.mutex());
  connections_.CloseAll();
}

std::vector<ReleasedConnection> Heartbeat::Release() {
  if (!owner_.IsHere()) return {};
  EndThread();
  std::vector<ReleasedConnection> released;
  {
    std::lock_guard lock(connections_.mutex());
    released = connections_.ReleaseOpen();
  }
  SendLeave();
  Stop();
  return released;
}

void Heartbeat::EndThread() {
  std::lock_guard ending(ending_);
  if (!worker_.joinable()) return;
  {
    std::lock_guard lock(connections_.mutex());
    connections_.set_stopping();
  }
  wakeup_->Ring();
  worker_.join();
}

// Runs RunLoop until Stop is called. Runs it again after an exception (out of memory).
void Heartbeat::RunThread() {
  while (true) {
    try {
      return RunLoop();
    } catch (const std::exception&) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
  }
}

void Heartbeat::RunLoop() {
  double next_beat = SecondsNow();
  std::array<epoll_event, 64> events;
  while (true) {
    {
      std::lock_guard lock(connections_.mutex());
      if (connections_.stopping()) return;
    }
    const double next = std::min(next_beat, probe_responder_.NextReplyTime());
    const double wait = std::clamp(next - SecondsNow(), 0.0, interval_);
    const int n =
        epoll_wait(connections_.epoll(), events.data(), static_cast<int>(events.size()),
                   static_cast<int>(wait * 1000) + 1);
    for (const epoll_event& event : std::span(events).first(n > 0 ? n : 0)) {
      auto* state = static_cast<PeerState*>(event.data.ptr);
      if (state == nullptr) {
        wakeup_->Drain();
        continue;
      }
      do {
        ReadFrom(state);
      } while (state->open && !state->moved_on && state->channel.readable());
    }
    probe_responder_.SendDueReplies();
    if (SecondsNow() >= next_beat) {
      SendBeats();
      wait_reports_.SendWaits();
      CheckSilence();
      // All ranks of a host send beats at multiples of the interval, so that one wakeup
      // of this thread finds many messages.
      next_beat = (std::floor(SecondsNow() / interval_) + 1) * interval_;
    }
  }
}

// Reads no byte beyond the next message, because the bytes behind a kEpoch message are
// for the next epoch.
void Heartbeat::ReadFrom(PeerState* state) {
  char buffer[sizeof(ControlMessage) + ControlMessage::kMaxText];
  const iovec piece{buffer, MissingBytes(*state)};
  const ssize_t n = state->channel.Receive({&piece, 1});
  if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return;
  const int rank = state->peer.rank;
  if (n <= 0) {
    const std::string why =
        n == 0 || errno == ECONNRESET ? "closed its connection (the process ended)"
        : errno == EBADMSG
            ? "sent data that were altered on their way, or are no TLS records"
            : std::strerror(errno);
    bool left;
    {
      std::lock_guard lock(connections_.mutex());
      left = state->left;
      connections_.Close(state);
    }
    if (!left) HandleDisconnection(rank, why);
    return;
  }
  {
    std::lock_guard lock(connections_.mutex());
    state->heard = SecondsNow();
  }
  state->input.append(buffer, static_cast<size_t>(n));
  HandleMessage(state);
}

// Returns how many bytes the next message, or its head, still lacks.
size_t Heartbeat::MissingBytes(const PeerState& state) const {
  ControlMessage message;
  const std::string& input = state.input;
  if (input.size() < sizeof message) return sizeof message - input.size();
  std::memcpy(&message, input.data(), sizeof message);
  return sizeof message + message.length - input.size();
}

// Returns whether the message is valid: its ranks exist, and its length fits its type.
bool Heartbeat::IsValid(const ControlMessage& message) const {
  using M = ControlMessage;
  // The minimum length of the text of each type, in the order of Type.
  constexpr size_t kMinText[] = {0,
                                 0,
                                 0,
                                 sizeof(M::ProbeHead),
                                 sizeof(M::ReplyHead),
                                 sizeof(M::Teardown),
                                 sizeof(M::WaitsHead),
                                 sizeof(M::ClockText),
                                 0,
                                 M::kEpochText};
  const int size = connections_.size();
  return message.magic == M().magic && message.type >= Type::kBeat &&
         message.type <= Type::kEpoch && message.length <= M::kMaxText &&
         message.length >= kMinText[static_cast<size_t>(message.type) - 1] &&
         message.from >= 0 && message.from < size && message.to >= -1 &&
         message.to < size && message.culprit < size &&
         message.culprit >= (message.type == Type::kEnded ? 0 : -1);
}

// Handles the message of the input, if it is complete.
void Heartbeat::HandleMessage(PeerState* state) {
  ControlMessage message;
  if (state->input.size() < sizeof message) return;
  std::memcpy(&message, state->input.data(), sizeof message);
  const int rank = state->peer.rank;
  if (!IsValid(message)) {
    {
      std::lock_guard lock(connections_.mutex());
      connections_.Close(state);
    }
    HandleDisconnection(rank, "sent garbage on its control connection");
    return;
  }
  if (state->input.size() < sizeof message + message.length) return;
  std::string text;
  {
    std::lock_guard lock(connections_.mutex());
    if (message.type == Type::kEpoch) return connections_.StopReading(state);
    text = state->input.substr(sizeof message);
    state->input.clear();
    for (int i : {0, 1})
      if (message.from == rank)
        state->entered[i] = std::max(state->entered[i], message.entered[i]);
    if (message.to >= 0 && message.to != connections_.rank()) {
      return connections_.Forward(message, text);
    }
  }
  if (message.type == Type::kLeave)
    HandleLeave(state, text);
  else
    Dispatch(message, text);
}

void Heartbeat::Dispatch(const ControlMessage& message, const std::string& text) {
  switch (message.type) {
    case Type::kFail:
      return HandleFailure(message, Printable(text, ControlMessage::kMaxText));
    case Type::kEnded:
      return teardown_announcements_.HandleEnd(message.culprit);
    case Type::kProbe:
      return probe_responder_.HandleProbe(message.from, text);
    case Type::kReply:
      return probe_sender_.HandleReply(message.from, text);
    case Type::kTeardown:
      return teardown_announcements_.HandleTeardown(message.from, text);
    case Type::kWaits:
      return wait_reports_.HandleWaits(message.from, text);
    case Type::kClock:
      return clock_offsets_.HandleClock(message.from, text);
    case Type::kBeat:
    case Type::kLeave:
    case Type::kEpoch:
      return;
  }
}

void Heartbeat::HandleFailure(const ControlMessage& message, const std::string& text) {
  if (message.culprit < 0)
    MarkLost(message.from, "failed: " + text);
  else
    MarkLost(message.culprit, text);
}

void Heartbeat::SendBeats() {
  std::lock_guard lock(connections_.mutex());
  if (shared_beats_) shared_beats_->Beat(watched_.entered());
  for (PeerState& state : connections_.states()) {
    const bool reads = shared_beats_ && shared_beats_->Reads(state.peer.rank);
    // A beat over the socket also sends the rest of a message that was sent in part.
    const bool unsent = !state.output.empty() || state.channel.pending();
    if (state.open && !state.moved_on && (unsent || !reads)) connections_.Beat(&state);
  }
}

void Heartbeat::CheckSilence() {
  std::vector<std::pair<int, double>> silent;
  {
    std::lock_guard lock(connections_.mutex());
    const double now = SecondsNow();
    // If this process itself was stopped for a while, it could not receive, so the
    // silence of its peers means nothing.
    const bool stood_still = now - last_look_ > interval_ + timeout_ / 2;
    last_look_ = now;
    for (PeerState& state : connections_.states()) {
      SharedBeats::Entered entered = {};
      const bool beat =
          shared_beats_ && shared_beats_->HasBeat(state.peer.rank, &entered);
      if (beat || stood_still) state.heard = now;
      for (int i : {0, 1}) state.entered[i] = std::max(state.entered[i], entered[i]);
      if (!state.open || state.left || state.moved_on) continue;
      if (now - state.heard < timeout_) continue;
      silent.push_back({state.peer.rank, now - state.heard});
      connections_.Close(&state);
    }
  }
  for (const auto& [rank, seconds] : silent)
    HandleDisconnection(rank, "has been silent for " +
                                  std::to_string(static_cast<int>(seconds)) +
                                  " s (stopped, or the network is cut)");
}

// Handles the end of the connection to a neighbour.
void Heartbeat::HandleDisconnection(int rank, const std::string& why) {
  MarkLost(rank, why);
  teardown_announcements_.HandleEnd(rank);
}

void Heartbeat::MarkLost(int rank, const std::string& why) {
  {
    std::lock_guard lock(connections_.mutex());
    for (const auto& [known, reason] : lost_)
      if (known == rank) return;
    lost_.push_back({rank, why});
  }
  const Status status(Code::kUnavailable, "rank " + std::to_string(rank) + " " + why,
                      rank);
  // Before the calls of this rank fail: the process may end then.
  if (!notify_) connections_.SendToNeighbours(Type::kFail, rank, why);
  for (const auto& c : WatchedWith(rank)) c->Abort(status);
  if (notify_) notify_->Ring();
}

void Heartbeat::HandleLeave(PeerState* state, const std::string& text) {
  std::map<int, uint64_t> finished;
  ControlMessage::Finished one;
  for (size_t at = 0; at + sizeof one <= text.size(); at += sizeof one) {
    std::memcpy(&one, text.data() + at, sizeof one);
    finished[one.communicator] = one.calls;
  }
  {
    std::lock_guard lock(connections_.mutex());
    state->left = true;
    state->finished = finished;
  }
  const int rank = state->peer.rank;
  for (const auto& c : WatchedWith(rank)) c->OnPeerShutdown(rank, finished[c->id()]);
  if (notify_) notify_->Ring();
}

std::vector<std::shared_ptr<Communicator>> Heartbeat::WatchedWith(int rank) const {
  std::lock_guard lock(connections_.mutex());
  return watched_.With(rank);
}

void Heartbeat::Watch(const std::shared_ptr<Communicator>& communicator,
                      const std::vector<int>& sharing) {
  // The hooks have weak pointers, because a communicator may outlive its heartbeat.
  const std::weak_ptr<Heartbeat> self = weak_from_this();
  HeartbeatHooks hooks;
  hooks.on_failure = [self](const Status& status) {
    if (auto heartbeat = self.lock()) heartbeat->Fail(status.message(), status.rank());
  };
  if (const int index = EnteredIndex(*communicator); index >= 0)
    hooks.late_ranks = [self, index](uint64_t sequence) {
      auto heartbeat = self.lock();
      return heartbeat ? heartbeat->LateRanks(index, sequence) : std::vector<int>{};
    };
  const std::shared_ptr<Heartbeat> owner = self.lock();
  hooks.straggler_probe = std::shared_ptr<StragglerProbe>(owner, &probe_sender_);
  hooks.teardown_barrier =
      std::shared_ptr<TeardownBarrier>(owner, &teardown_announcements_);
  communicator->heartbeat().SetHooks(std::move(hooks));
  std::vector<std::pair<int, std::string>> lost_before;
  std::map<int, uint64_t> left_before;
  {
    std::lock_guard lock(connections_.mutex());
    watched_.Add(communicator);
    const Doorbell& doorbell = communicator->heartbeat().doorbell();
    if (sharing.size() > 1)
      shared_beats_.emplace(doorbell.memory(), doorbell.index(), sharing);
    lost_before = lost_;
    for (const PeerState& state : connections_.states())
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
  std::lock_guard lock(connections_.mutex());
  watched_.Remove(communicator);
}

void Heartbeat::Fail(const std::string& message, int culprit) {
  std::string what = message;
  if (culprit < 0) {
    std::lock_guard lock(connections_.mutex());
    if (!lost_.empty()) std::tie(culprit, what) = lost_.front();
  }
  connections_.SendToNeighbours(Type::kFail, culprit, what);
  if (notify_ && culprit >= 0 && culprit != connections_.rank())
    MarkLost(culprit, what);
}

void Heartbeat::Leave() {
  {
    std::lock_guard lock(connections_.mutex());
    for (const auto& c : watched_.All()) c->heartbeat().AnnounceShutdown();
  }
  SendLeave();
}

void Heartbeat::SendLeave() {
  std::string text;
  {
    std::lock_guard lock(connections_.mutex());
    text = watched_.FinishedCalls();
  }
  connections_.SendToNeighbours(Type::kLeave, -1, text);
}

std::vector<std::pair<int, std::string>> Heartbeat::lost() const {
  std::lock_guard lock(connections_.mutex());
  return lost_;
}

std::vector<int> Heartbeat::left() const {
  std::lock_guard lock(connections_.mutex());
  std::vector<int> ranks;
  for (const PeerState& state : connections_.states())
    if (state.left) ranks.push_back(state.peer.rank);
  return ranks;
}

std::vector<int> Heartbeat::LateRanks(int index, uint64_t sequence) const {
  std::lock_guard lock(connections_.mutex());
  std::vector<int> ranks;
  for (const PeerState& state : connections_.states())
    if (state.entered[index] < sequence) ranks.push_back(state.peer.rank);
  return ranks;
}

}  // namespace ringjax
