// Writes messages to peers, and registers sockets with epoll. See
// control_connections.h.
#include "engine/heartbeat/control_connections.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <system_error>
#include <utility>

namespace ringjax {

double SecondsNow() {
  return std::chrono::duration<double>(Clock::now().time_since_epoch()).count();
}

ControlConnections::ControlConnections(int rank, std::vector<std::string> hosts,
                                       const std::vector<PeerState::Peer>& peers,
                                       const EventFd& wakeup,
                                       const WatchedCommunicators* watched)
    : rank_(rank), hosts_(std::move(hosts)), watched_(watched) {
  for (const PeerState::Peer& peer : peers) {
    fcntl(peer.fd, F_SETFL, fcntl(peer.fd, F_GETFL) | O_NONBLOCK);
    PeerState& state = states_.emplace_back(peer);
    state.heard = SecondsNow();
  }
  try {
    RegisterSockets(wakeup);
  } catch (...) {
    CloseAll();
    if (epoll_ >= 0) close(epoll_);
    throw;
  }
}

ControlConnections::~ControlConnections() { close(epoll_); }

// Registers the doorbell and all sockets with epoll. Close must deregister a socket
// explicitly, because a closed socket stays registered while a forked child has a copy.
void ControlConnections::RegisterSockets(const EventFd& wakeup) {
  const auto check = [](int result) {
    if (result < 0) throw std::system_error(errno, std::generic_category(), "epoll");
  };
  check(epoll_ = epoll_create1(EPOLL_CLOEXEC));
  const auto add = [&](int fd, PeerState* state) {
    epoll_event event{EPOLLIN, {.ptr = state}};
    check(epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event));
  };
  add(wakeup.fd(), nullptr);
  for (PeerState& state : states_) add(state.peer.fd, &state);
}

// Returns the neighbour that is nearest to `rank`, null if none is nearer than this
// rank. Each hop comes nearer, so a message never returns to a rank.
PeerState* ControlConnections::NextHop(int rank) {
  const auto distance = [&](int from) {
    const int clockwise = (rank - from + size()) % size();
    return std::min(clockwise, size() - clockwise);
  };
  PeerState* best = nullptr;
  int least = distance(rank_);
  for (PeerState& state : states_) {
    if (!state.open || state.moved_on || distance(state.peer.rank) >= least) continue;
    best = &state;
    least = distance(state.peer.rank);
  }
  return best;
}

ControlMessage ControlConnections::Head(ControlMessage::Type type, int to, int culprit,
                                        size_t length) const {
  ControlMessage message;
  message.type = type;
  message.from = rank_;
  message.to = to;
  message.culprit = culprit;
  message.length = static_cast<uint32_t>(length);
  message.entered = watched_->entered();
  return message;
}

void ControlConnections::Send(int rank, ControlMessage::Type type,
                              std::string_view text) {
  Forward(Head(type, rank, -1, text.size()), text);
}

void ControlConnections::Forward(const ControlMessage& message, std::string_view text) {
  if (PeerState* next = NextHop(message.to)) Write(next, WithHead(message, text), 0);
}

// Sends the rest of an earlier message, and then `message`. Stops once the peer has
// accepted no bytes for `limit_ms`. Then drops `message` if no byte of it was sent.
// Otherwise keeps its rest for the next Write, because the stream must stay intact.
void ControlConnections::Write(PeerState* state, const std::string& message,
                               int limit_ms) {
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

void ControlConnections::SendToNeighbours(ControlMessage::Type type, int culprit,
                                          const std::string& text) {
  std::lock_guard lock(mutex_);
  const std::string_view cut = Cut(text, ControlMessage::kMaxText);
  const std::string bytes = WithHead(Head(type, -1, culprit, cut.size()), cut);
  for (PeerState& state : states_)
    if (state.open && !state.moved_on) Write(&state, bytes, 100);
}

void ControlConnections::Beat(PeerState* state) {
  Write(state, WithHead(Head(ControlMessage::Type::kBeat, -1, -1, 0), ""), 0);
}

void ControlConnections::Close(PeerState* state) {
  if (!state->open) return;
  state->open = false;
  Deregister(*state);
  // The peer must see the end even if a forked child has a copy of the socket, because
  // ranks keep their connections over the epochs as long as these are open.
  shutdown(state->channel.fd(), SHUT_RDWR);
  state->channel.Close();
}

void ControlConnections::Deregister(const PeerState& state) {
  if (epoll_ >= 0) epoll_ctl(epoll_, EPOLL_CTL_DEL, state.channel.fd(), nullptr);
}

void ControlConnections::StopReading(PeerState* state) {
  state->moved_on = true;
  Deregister(*state);
}

std::vector<ReleasedConnection> ControlConnections::ReleaseOpen() {
  std::vector<ReleasedConnection> released;
  for (PeerState& state : states_) {
    if (!state.open || state.left || state.encrypted) continue;
    Deregister(state);
    state.open = false;
    released.push_back({state.peer.rank, state.channel.fd(), std::move(state.input),
                        std::move(state.output)});
    state.channel.Release();
  }
  return released;
}

void ControlConnections::CloseAll() {
  for (PeerState& state : states_) Close(&state);
}

void ControlConnections::Release() {
  for (PeerState& state : states_) state.channel.Release();
}

}  // namespace ringjax
