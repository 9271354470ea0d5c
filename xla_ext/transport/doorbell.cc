// See doorbell.h.
#include "transport/doorbell.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <ctime>
#include <random>
#include <system_error>
#include <utility>

#include "transport/descriptor.h"

namespace ringjax {
namespace {

constexpr size_t kMinRingBytes = 64;  // the memory of one rank has no pair

std::shared_ptr<HostMemory> OwnMemory() {
  return HostMemory::Local({1, kMinRingBytes, 0});
}

std::string OwnName() {
  std::random_device random;
  return std::to_string((uint64_t{random()} << 32) | random());
}

long Futex(uint32_t* word, int operation, uint32_t value, const timespec* limit) {
  return syscall(SYS_futex, word, operation, value, limit, nullptr, 0);
}

// The address of a rank's socket in the abstract namespace: it begins with a zero byte,
// and is no file.
struct Address {
  Address(const std::string& name, int index) {
    unix_name.sun_family = AF_UNIX;
    const std::string text = "ringjax-" + name + "-" + std::to_string(index);
    const size_t bytes = std::min(text.size(), sizeof(unix_name.sun_path) - 1);
    std::memcpy(unix_name.sun_path + 1, text.data(), bytes);
    length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + bytes);
  }
  const sockaddr* generic() const {
    return reinterpret_cast<const sockaddr*>(&unix_name);
  }

  sockaddr_un unix_name{};
  socklen_t length;
};

}  // namespace

Doorbell::Doorbell() : Doorbell(OwnMemory(), 0, OwnName()) {}

Doorbell::Doorbell(std::shared_ptr<HostMemory> memory, int index, std::string name)
    : memory_(std::move(memory)), index_(index), name_(std::move(name)) {
  StoreShared(words(index_).process, static_cast<int32_t>(getpid()));
}

Doorbell::~Doorbell() {
  Close();
  if (socket_ >= 0) close(socket_);
}

Status Doorbell::Open() {
  if (socket_ >= 0) return OkStatus();
  Descriptor made(::socket(AF_UNIX, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  const Address own(name_, index_);
  if (made.get() < 0 || bind(made.get(), own.generic(), own.length) != 0)
    return Status(Code::kUnavailable,
                  "the socket by which ranks of this host wake this rank: " +
                      std::generic_category().message(errno));
  socket_ = made.Release();
  return OkStatus();
}

void Doorbell::RingPeer(int index) {
  HostWords& peer = words(index);
  // Sequentially consistent, and before the load of `asleep`: pairs with Sleep.
  std::atomic_ref<uint32_t>(peer.rings).fetch_add(1, std::memory_order_seq_cst);
  const uint32_t asleep = LoadShared(peer.asleep);
  if (asleep == kInFutex) Futex(&peer.rings, FUTEX_WAKE, 1, nullptr);
  if (asleep == kInPoll) SendTo(index);
}

// Sends an empty datagram. If it cannot be sent because the queue is full, the owner
// wakes up anyway.
void Doorbell::SendTo(int index) {
  const Address peer(name_, index);
  const int own = socket_;
  const int fd = own >= 0 ? own : ::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  while (sendto(fd, nullptr, 0, MSG_DONTWAIT | MSG_NOSIGNAL, peer.generic(),
                peer.length) < 0 &&
         errno == EINTR) {
  }
  if (fd != own) close(fd);
}

void Doorbell::Close() {
  if (std::atomic_ref<uint32_t>(words(index_).closed).exchange(1) != 0) return;
  for (int peer = 0; peer < memory_->layout().ranks; ++peer)
    if (peer != index_) RingPeer(peer);
}

void Doorbell::Sleep(std::vector<pollfd>* fds, int ms) {
  HostWords& own = words(index_);
  const bool polls = !fds->empty();
  if (polls && !Open().ok()) ms = std::min(ms, 1);
  // Pairs with RingPeer, which adds to `rings` and then loads `asleep`: either the peer
  // sees that this rank is asleep, or this rank sees the new value of `rings`.
  StoreShared(own.asleep, uint32_t{polls ? kInPoll : kInFutex});
  if (!polls) {
    const timespec limit{ms / 1000, ms % 1000 * 1'000'000L};
    Futex(&own.rings, FUTEX_WAIT, heard_, &limit);
  } else if (LoadShared(own.rings) == heard_) {
    fds->push_back({socket_, POLLIN, 0});
    poll(fds->data(), fds->size(), ms);
  }
  StoreShared(own.asleep, uint32_t{kAwake});
  heard_ = LoadShared(own.rings);
  while (polls && recv(socket_, nullptr, 0, MSG_DONTWAIT) >= 0) {
  }
}

}  // namespace ringjax
