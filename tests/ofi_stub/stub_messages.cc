// Messages of the stub travel over Unix sockets. An endpoint connects to a peer when it
// first sends to it, and a connection carries one direction.
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <atomic>
#include <cerrno>

#include "stub_objects.h"

namespace ringjax::ofi {
namespace {

constexpr int kTruncated = 265;

void Watch(const StubCq* cq, int fd, uint32_t events) {
  epoll_event event{.events = events, .data = {.fd = fd}};
  epoll_ctl(cq->epoll, EPOLL_CTL_ADD, fd, &event);
}

// A forked child may hold the socket, too, so closing it would leave it in the set.
void Unwatch(const StubCq* cq, int fd) {
  epoll_ctl(cq->epoll, EPOLL_CTL_DEL, fd, nullptr);
}

// The name is abstract, so a process that is killed leaves no file.
socklen_t MakeName(const std::string& address, sockaddr_un* name) {
  *name = {.sun_family = AF_UNIX, .sun_path = {}};
  std::memcpy(name->sun_path + 1, address.data(), address.size());
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + address.size());
}

int NewSocket() {
  return socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
}

int ConnectTo(const std::string& address) {
  sockaddr_un name;
  const socklen_t length = MakeName(address, &name);
  const int fd = NewSocket();
  if (connect(fd, reinterpret_cast<sockaddr*>(&name), length) == 0) return fd;
  close(fd);
  return -1;
}

}  // namespace

int StubEp::Open() {
  static std::atomic<int> opened{0};
  address = "ofi-stub-" + std::to_string(getpid()) + "-" + std::to_string(++opened);
  sockaddr_un name;
  const socklen_t length = MakeName(address, &name);
  listener = NewSocket();
  if (bind(listener, reinterpret_cast<sockaddr*>(&name), length) != 0 ||
      listen(listener, 4096) != 0)
    return -errno;
  Watch(cq, listener, EPOLLIN);
  enabled = true;
  return 0;
}

void StubEp::Close() {
  for (auto& [peer, out] : outgoing)
    for (Sending& sending : out.queue) Complete(sending.operation, 0, ECANCELED);
  for (Operation& receive : receives) Complete(receive, 0, ECANCELED);
  for (auto& [peer, out] : outgoing)
    if (out.socket >= 0) Unwatch(cq, out.socket), close(out.socket);
  for (Incoming& in : incoming) Unwatch(cq, in.socket), close(in.socket);
  if (listener >= 0) Unwatch(cq, listener), close(listener);
  if (cq != nullptr) {
    cq->endpoints.erase(this);
    // Nothing of a closed endpoint comes out of its queue.
    std::erase_if(cq->ready,
                  [this](const Completion& c) { return c.endpoint == this; });
    cq->Ring(!cq->ready.empty());
  }
  if (av != nullptr) --av->children;
  --domain->children;
  g_log.Write("{\"closed\": \"" + address +
              "\", \"messages\": " + std::to_string(sent) +
              ", \"unexpected\": " + std::to_string(most_unexpected) + "}");
}

// Stops all messages without an error, as a card that hangs.
void StubEp::FallSilent() {
  silent = true;
  Unwatch(cq, listener);
  for (Incoming& in : incoming) Unwatch(cq, in.socket);
}

void StubEp::Complete(const Operation& operation, size_t bytes, int error) {
  if (operation.region != nullptr) --operation.region->posted;
  if (operation.context == nullptr) return;  // injected
  Require(static_cast<Context*>(operation.context)->internal[7] == operation.context,
          "the context of an operation under way was written to, or used twice");
  static_cast<Context*>(operation.context)->internal[7] = nullptr;
  --cq->under_way;
  Completion completion;
  completion.endpoint = this;
  completion.entry.op_context = operation.context;
  completion.entry.flags = operation.flags;
  completion.entry.len = bytes;
  completion.entry.tag = operation.tag;
  completion.entry.err = error;
  completion.entry.prov_errno = error == 0 ? 0 : 12;
  cq->Put(completion, &settings);
}

void StubEp::Deliver(uint64_t tag, std::string_view bytes) {
  for (auto at = receives.begin(); at != receives.end(); ++at) {
    if (at->tag != tag) continue;
    const size_t fits = std::min(at->bytes, bytes.size());
    const bool fails = settings.fail.Strikes("receive");
    if (!fails) std::memcpy(at->buffer, bytes.data(), fits);
    Complete(*at, fits, fails ? EIO : fits < bytes.size() ? kTruncated : 0);
    receives.erase(at);
    return;
  }
  if (closed.count(tag) > 0) return;  // its link is closed, which the peer cannot know
  unexpected.emplace_back(tag, bytes);
  most_unexpected = std::max(most_unexpected, unexpected.size());
  Require(static_cast<int>(unexpected.size()) <= settings.unexpected,
          "a message arrives for which no receive was posted");
}

void StubEp::Progress() {
  if (silent) return;
  for (int fd;
       (fd = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK)) >= 0;) {
    incoming.push_back({fd, {}});
    Watch(cq, fd, EPOLLIN);
  }
  incoming.remove_if([this](Incoming& in) {
    if (Read(&in)) return false;
    Unwatch(cq, in.socket);
    close(in.socket);
    return true;
  });
  for (auto& [peer, out] : outgoing) Push(&out);
}

// Returns false once the peer has closed the connection, which is no error.
bool StubEp::Read(Incoming* in) {
  static thread_local std::vector<char> chunk(256 << 10);
  const ssize_t n = recv(in->socket, chunk.data(), chunk.size(), 0);
  if (n <= 0) return n < 0 && errno == EAGAIN;
  in->bytes.append(chunk.data(), static_cast<size_t>(n));
  size_t at = 0;
  for (Frame frame; in->bytes.size() - at >= sizeof frame;) {
    std::memcpy(&frame, in->bytes.data() + at, sizeof frame);
    if (in->bytes.size() - at - sizeof frame < frame.bytes) break;
    Deliver(frame.tag,
            std::string_view(in->bytes).substr(at + sizeof frame, frame.bytes));
    at += sizeof frame + frame.bytes;
  }
  in->bytes.erase(0, at);
  return true;
}

void StubEp::Queue(uint64_t to, Sending sending) {
  Outgoing& out = outgoing[to];
  if (out.socket < 0 && !out.lost) {
    out.socket = ConnectTo(av->addresses[to]);
    out.lost = out.socket < 0;
  }
  out.queue.push_back(std::move(sending));
  if (!settings.lazy)
    Push(&out);
  else
    cq->Ring(true);  // a lazy provider still has something to do
}

// Sends as much as the socket accepts. A message to a process that is gone never
// completes, unless OFI_STUB_TELL_LOST asks for an error.
void StubEp::Push(Outgoing* out) {
  while (!out->queue.empty() && !out->lost && !silent) {
    Sending& next = out->queue.front();
    Operation& operation = next.operation;
    // After an error, a card sends nothing more to this peer.
    out->failed |= next.fails;
    if (out->failed) {
      Complete(operation, 0, EHOSTUNREACH);
      out->queue.pop_front();
      continue;
    }
    if (static_cast<double>(sent) >= settings.silent_after) {
      FallSilent();
      break;
    }
    Require(operation.context == nullptr ||
                next.digest == Digest(operation.buffer, operation.bytes),
            "the bytes of a message changed while it was under way");
    const void* data = operation.buffer;
    if (!next.copy.empty()) data = next.copy.data();
    iovec pieces[2] = {{&next.frame, sizeof(Frame)},
                       {const_cast<void*>(data), next.frame.bytes}};
    for (size_t skip = next.done; iovec& piece : pieces) {
      const size_t over = std::min(skip, piece.iov_len);
      piece = {static_cast<char*>(piece.iov_base) + over, piece.iov_len - over};
      skip -= over;
    }
    msghdr message = {};
    message.msg_iov = pieces;
    message.msg_iovlen = 2;
    const ssize_t n = sendmsg(out->socket, &message, MSG_NOSIGNAL);
    if (n < 0 && errno != EAGAIN) out->lost = true;
    if (n < 0) break;
    next.done += static_cast<size_t>(n);
    if (next.done < sizeof(Frame) + next.frame.bytes) continue;
    ++sent;
    Complete(operation, operation.bytes, 0);
    out->queue.pop_front();
  }
  for (; out->lost && settings.tell_lost && !out->queue.empty(); out->queue.pop_front())
    Complete(out->queue.front().operation, 0, EHOSTUNREACH);
  const bool waits = !out->queue.empty() && !out->lost && !silent;
  if (waits && !out->polled) Watch(cq, out->socket, EPOLLOUT);
  if (!waits && out->polled) Unwatch(cq, out->socket);
  out->polled = waits;
}

}  // namespace ringjax::ofi
