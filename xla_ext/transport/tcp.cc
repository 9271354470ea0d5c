// A link over TCP. The byte stream of each direction is cut into blocks, which go over
// the sockets in turn: long messages use several flows, and short messages stay on one.
// Both ends count bytes, so blocks need no header. The caller passes sockets that are
// connected and authenticated, and their keys if bytes are to be encrypted (channel.h).
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdint>
#include <cstring>
#include <string>
#include <system_error>

#include "transport/channel.h"
#include "transport/link.h"

namespace ringjax {
namespace {

constexpr size_t kBlock = 256 << 10;     // bytes before the next socket's turn
constexpr size_t kStaging = 256 << 10;   // buffer of Reserve or Peek
constexpr size_t kReadAhead = 16 << 10;  // bytes read beyond a short read
constexpr size_t kShortRead = 4 << 10;
// The send buffer of a socket between ranks of one host. With the larger buffer that
// the system would choose, a transfer costs up to twice the CPU time, presumably
// because of cache misses. Between hosts the system's choice is kept.
constexpr int kLocalSendBuffer = 384 << 10;

Status SocketError(const char* call, int error) {
  if (error == EBADMSG)
    return Status(Code::kUnavailable,
                  "the data from it were altered on their way, or are no TLS records");
  const bool ours = error == EBADF || error == ENOTSOCK || error == EFAULT ||
                    error == EINVAL || error == ENOMEM;
  return Status(ours ? Code::kInternal : Code::kUnavailable,
                std::string(call) + ": " + std::generic_category().message(error));
}

bool WouldBlock(int error) { return error == EAGAIN || error == EWOULDBLOCK; }

// A buffer that holds bytes in [begin_, end_). end() allocates it when first called.
class Staging {
 public:
  size_t size() const { return end_ - begin_; }
  size_t room() const { return kStaging - end_; }
  const std::byte* data() const { return bytes_.get() + begin_; }
  std::byte* end() {
    if (!bytes_) bytes_.reset(new std::byte[kStaging]);
    return bytes_.get() + end_;
  }
  void Append(size_t n) { end_ += n; }
  void Drop(size_t n) {
    begin_ += n;
    if (begin_ == end_) begin_ = end_ = 0;
  }
  // Moves the bytes to the front of the buffer. Peek calls Compact if the buffer
  // contains less than one element.
  void Compact() {
    if (begin_ == 0) return;
    std::memmove(bytes_.get(), data(), size());
    end_ -= begin_;
    begin_ = 0;
  }

 private:
  std::unique_ptr<std::byte[]> bytes_;
  size_t begin_ = 0, end_ = 0;
};

// The state of one direction. `bytes` determines the socket of the next byte (Index)
// and how many bytes go over that socket before the next socket's turn (BlockLeft).
struct Direction {
  uint64_t bytes = 0;  // moved over the sockets so far
  Status broken;       // the first error of this direction, kept for good
  Staging staging;
};

class TcpLink final : public Link {
 public:
  explicit TcpLink(std::vector<Channel> sockets) : sockets_(std::move(sockets)) {}
  std::string_view transport() const override { return "tcp"; }

  Result<size_t> TryWrite(std::span<const iovec> pieces) override;
  Result<size_t> TryRead(std::span<const iovec> pieces) override;
  Result<std::span<std::byte>> Reserve(size_t limit, size_t granularity) override;
  Status Commit(size_t bytes) override;
  Result<std::span<const std::byte>> Peek(size_t limit, size_t granularity) override;
  void Consume(size_t bytes) override { in_.staging.Drop(bytes); }
  Result<bool> Flush() override;
  bool Arm(bool want_read, bool want_write, std::vector<pollfd>* fds) override;
  void Disarm() override {}

 private:
  size_t Index(const Direction& d) const { return d.bytes / kBlock % sockets_.size(); }
  size_t BlockLeft(const Direction& d) const {
    return sockets_.size() == 1 ? size_t{INT_MAX} : kBlock - d.bytes % kBlock;
  }

  // Fills message_ with at most `limit` bytes of `pieces` that follow the first `skip`
  // bytes. Returns the number of bytes in message_.
  size_t Gather(std::span<const iovec> pieces, size_t skip, size_t limit);
  // Move message_, which has `bytes` bytes, over the socket whose turn it is. Return
  // how many bytes moved; 0 means either that Direction::broken holds an error or that
  // the caller should try again later.
  size_t Send(size_t bytes);
  size_t Receive(size_t bytes);

  // Sends the pending bytes of all sockets (Channel::pending). Returns false if some
  // are left, or on an error.
  bool FlushSockets();

  std::vector<Channel> sockets_;
  Direction out_, in_;
  std::vector<iovec> message_;
  size_t scant_bytes_ = 0;  // bytes of an incomplete element that the last Peek found
};

size_t TcpLink::Gather(std::span<const iovec> pieces, size_t skip, size_t limit) {
  message_.clear();
  size_t total = 0;
  for (const iovec& piece : pieces) {
    if (skip >= piece.iov_len) {
      skip -= piece.iov_len;
      continue;
    }
    const size_t n = std::min(piece.iov_len - skip, limit - total);
    message_.push_back({static_cast<std::byte*>(piece.iov_base) + skip, n});
    skip = 0;
    total += n;
    if (total == limit || message_.size() == IOV_MAX - 1) break;
  }
  return total;
}

size_t TcpLink::Send(size_t bytes) {
  if (!out_.broken.ok() || bytes == 0) return 0;
  const ssize_t n = sockets_[Index(out_)].Send(message_);
  if (n < 0) {
    if (!WouldBlock(errno)) out_.broken = SocketError("send", errno);
    return 0;
  }
  out_.bytes += static_cast<uint64_t>(n);
  return static_cast<size_t>(n);
}

size_t TcpLink::Receive(size_t bytes) {
  if (!in_.broken.ok() || bytes == 0) return 0;
  const ssize_t n = sockets_[Index(in_)].Receive(message_);
  if (n == 0) in_.broken = Status(Code::kUnavailable, "has closed the connection");
  if (n < 0 && !WouldBlock(errno)) in_.broken = SocketError("receive", errno);
  if (n <= 0) return 0;
  in_.bytes += static_cast<uint64_t>(n);
  return static_cast<size_t>(n);
}

bool TcpLink::FlushSockets() {
  for (Channel& socket : sockets_) {
    if (socket.Flush() > 0) continue;
    if (!WouldBlock(errno)) out_.broken = SocketError("send", errno);
    return false;
  }
  return true;
}

Result<bool> TcpLink::Flush() {
  Staging& staged = out_.staging;
  while (staged.size() > 0) {
    const size_t n = std::min(staged.size(), BlockLeft(out_));
    message_.assign(1, {const_cast<std::byte*>(staged.data()), n});
    const size_t sent = Send(n);
    if (!out_.broken.ok()) return out_.broken;
    staged.Drop(sent);
    if (sent < n) return false;
  }
  const bool all = FlushSockets();
  if (!out_.broken.ok()) return out_.broken;
  return all;
}

Result<size_t> TcpLink::TryWrite(std::span<const iovec> pieces) {
  if (!out_.broken.ok()) return out_.broken;
  const Result<bool> flushed = Flush();
  if (!flushed.ok()) return flushed.status();
  if (!flushed.value()) return size_t{0};
  size_t moved = 0;
  while (true) {
    const size_t n = Gather(pieces, moved, BlockLeft(out_));
    const size_t sent = Send(n);
    moved += sent;
    if (sent < n || n == 0) break;
  }
  if (moved == 0 && !out_.broken.ok()) return out_.broken;
  return moved;
}

Result<size_t> TcpLink::TryRead(std::span<const iovec> pieces) {
  scant_bytes_ = 0;
  size_t moved = 0;
  Staging& staged = in_.staging;
  while (true) {
    const size_t n = Gather(pieces, moved, BlockLeft(in_));
    if (n == 0) break;
    if (staged.size() > 0) {
      for (const iovec& piece : message_) {
        const size_t part = std::min(piece.iov_len, staged.size());
        std::memcpy(piece.iov_base, staged.data(), part);
        staged.Drop(part);
        moved += part;
      }
      continue;
    }
    // A short read also moves the bytes that follow into the staging buffer, so that
    // one system call receives a header and the payload behind it.
    size_t ahead = 0;
    if (n < kShortRead) {
      ahead = std::min(kReadAhead, BlockLeft(in_) - n);
      if (ahead > 0) message_.push_back({staged.end(), ahead});
    }
    const size_t received = Receive(n + ahead);
    if (received > n) staged.Append(received - n);
    moved += std::min(received, n);
    if (received < n) break;
  }
  if (moved == 0 && !in_.broken.ok()) return in_.broken;
  return moved;
}

Result<std::span<std::byte>> TcpLink::Reserve(size_t limit, size_t granularity) {
  if (!out_.broken.ok()) return out_.broken;
  Staging& staged = out_.staging;
  if (staged.room() < limit) {
    const Result<bool> flushed = Flush();
    if (!flushed.ok()) return flushed.status();
  }
  const size_t n = std::min(limit, staged.room()) & ~(granularity - 1);
  if (n == 0) return std::span<std::byte>();
  return std::span<std::byte>(staged.end(), n);
}

Status TcpLink::Commit(size_t bytes) {
  out_.staging.Append(bytes);
  return Flush().status();
}

Result<std::span<const std::byte>> TcpLink::Peek(size_t limit, size_t granularity) {
  Staging& staged = in_.staging;
  scant_bytes_ = 0;
  while (staged.size() < granularity && limit >= granularity) {
    staged.Compact();
    const size_t wanted = std::max(limit - staged.size(), kReadAhead);
    const size_t n = std::min({wanted, staged.room(), BlockLeft(in_)});
    message_.assign(1, {staged.end(), n});
    const size_t received = Receive(n);
    staged.Append(received);
    if (received == 0) break;
  }
  const size_t n = std::min(staged.size(), limit) & ~(granularity - 1);
  if (n > 0) return std::span<const std::byte>(staged.data(), n);
  if (!in_.broken.ok() && limit > 0) return in_.broken;
  scant_bytes_ = staged.size();
  return std::span<const std::byte>();
}

bool TcpLink::Arm(bool want_read, bool want_write, std::vector<pollfd>* fds) {
  if (want_read && in_.staging.size() > scant_bytes_) return true;
  if ((want_read && !in_.broken.ok()) || (want_write && !out_.broken.ok())) return true;
  const Channel& source = sockets_[Index(in_)];
  if (want_read && source.readable()) return true;
  // TryWrite takes no bytes before all sockets have sent their pending bytes, so a
  // socket with pending bytes is the one to wait for.
  const auto held =
      std::find_if(sockets_.begin(), sockets_.end(),
                   [](const Channel& socket) { return socket.pending(); });
  const int from = source.fd();
  const int to = held != sockets_.end() ? held->fd() : sockets_[Index(out_)].fd();
  const bool same = want_read && want_write && from == to;
  if (want_read)
    fds->push_back({from, static_cast<short>(same ? POLLIN | POLLOUT : POLLIN), 0});
  if (want_write && !same) fds->push_back({to, POLLOUT, 0});
  return false;
}

// Returns whether the peer is on this host. In that case both ends of the socket have
// the same IP address.
bool IsOnThisHost(int fd) {
  sockaddr_storage own{}, peer{};
  socklen_t own_size = sizeof(own), peer_size = sizeof(peer);
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&own), &own_size) != 0 ||
      getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &peer_size) != 0 ||
      own.ss_family != peer.ss_family)
    return false;
  if (own.ss_family == AF_INET)
    return reinterpret_cast<sockaddr_in&>(own).sin_addr.s_addr ==
           reinterpret_cast<sockaddr_in&>(peer).sin_addr.s_addr;
  return own.ss_family == AF_INET6 &&
         std::memcmp(&reinterpret_cast<sockaddr_in6&>(own).sin6_addr,
                     &reinterpret_cast<sockaddr_in6&>(peer).sin6_addr,
                     sizeof(in6_addr)) == 0;
}

// Checks that `fd` is a stream socket. Makes it non-blocking and not inherited by child
// processes, and sets its options.
Status Prepare(int fd) {
  int type = 0;
  socklen_t length = sizeof(type);
  if (getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &length) != 0)
    return SocketError("getsockopt", errno);
  if (type != SOCK_STREAM)
    return Status(Code::kInvalidArgument, "a TCP link needs stream sockets");
  const int flags = fcntl(fd, F_GETFL);
  if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) != 0 ||
      fcntl(fd, F_SETFD, FD_CLOEXEC) != 0)
    return SocketError("fcntl", errno);
  // Unix sockets refuse TCP_NODELAY, but they never delay data.
  const int on = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  if (IsOnThisHost(fd))
    setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &kLocalSendBuffer, sizeof(kLocalSendBuffer));
  return OkStatus();
}

}  // namespace

Result<std::unique_ptr<Link>> MakeTcpLink(std::vector<int> sockets,
                                          std::span<const std::string> keys) {
  Status status = CheckKeys(keys, sockets.size());
  if (status.ok() && sockets.empty())
    status = Status(Code::kInvalidArgument, "a TCP link needs a socket");
  for (int fd : sockets)
    if (status.ok()) status = Prepare(fd);
  if (!status.ok()) {
    for (int fd : sockets) close(fd);
    return status;
  }
  std::vector<Channel> channels;
  channels.reserve(sockets.size());
  for (size_t i = 0; i < sockets.size(); ++i)
    channels.emplace_back(sockets[i],
                          keys.empty() ? std::span<const std::byte>() : KeyOf(keys[i]));
  return std::unique_ptr<Link>(std::make_unique<TcpLink>(std::move(channels)));
}

}  // namespace ringjax
