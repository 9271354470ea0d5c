// Two connected ends of every kind of link, for tests that need no communicator.
#pragma once

#include <fcntl.h>
#include <netinet/in.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "local_world.h"
#include "transport/channel.h"
#include "transport/fabric_endpoint.h"
#include "transport/ring_link.h"

namespace ringjax {

// Two ends and the doorbells on which they sleep.
struct Ends {
  std::unique_ptr<Doorbell> bells[2];
  std::unique_ptr<Link> links[2];
};
using MakeEnds = std::function<Ends()>;

inline Ends RingEnds(const std::shared_ptr<HostMemory>& one,
                     const std::shared_ptr<HostMemory>& other) {
  Ends ends;
  auto bells = MakeDoorbells({one, other});
  for (int side = 0; side < 2; ++side) {
    ends.bells[side] = std::move(bells[side]);
    ends.links[side] =
        std::move(MakeRingLink(ends.bells[side].get(), 1 - side).value());
  }
  return ends;
}

inline Ends LocalEnds(size_t ring, size_t tile = 0) {
  const auto memory = HostMemory::Local({2, ring, tile});
  return RingEnds(memory, memory);
}

inline int MakeMemfd(size_t bytes, int seals = F_SEAL_SHRINK | F_SEAL_GROW) {
  const int fd = memfd_create("ringjax-test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  CHECK(fd >= 0 && ftruncate(fd, static_cast<off_t>(bytes)) == 0);
  CHECK(fcntl(fd, F_ADD_SEALS, seals) == 0);
  return fd;
}

// Each side has mapped the memory for itself.
inline Ends ShmEnds(size_t ring, size_t tile = 0) {
  const HostLayout layout{2, ring, tile};
  const int memfd = MakeMemfd(HostBytes(layout));
  return RingEnds(HostMemory::Map(dup(memfd), layout).value(),
                  HostMemory::Map(memfd, layout).value());
}

// Returns what the two sides of LocalEnds or ShmEnds share, where a test can write as a
// hostile peer would.
inline RingPair* SharedBy(const Ends& ends) {
  return reinterpret_cast<RingPair*>(ends.bells[0]->memory()->Pair(0, 1).value());
}

inline std::pair<int, int> Loopback() {
  const int listener = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  auto* generic = reinterpret_cast<sockaddr*>(&address);
  CHECK(bind(listener, generic, length) == 0 && listen(listener, 1) == 0);
  CHECK(getsockname(listener, generic, &length) == 0);
  const int one = socket(AF_INET, SOCK_STREAM, 0);
  CHECK(connect(one, generic, length) == 0);
  const int other = accept(listener, nullptr, nullptr);
  CHECK(other >= 0);
  close(listener);
  return {one, other};
}

inline std::pair<int, int> UnixPair() {
  int fds[2];
  CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, fds) == 0);
  return {fds[0], fds[1]};
}

// Returns the keys of one end of a connection, in the format of a handshake.
inline std::string ChannelKey(int side, size_t connection = 0) {
  const char first = static_cast<char>(2 * connection + 1);
  const std::string up(Cipher::kSecretBytes, first);
  const std::string down(Cipher::kSecretBytes, static_cast<char>(first + 1));
  return side == 0 ? up + down : down + up;
}

inline Ends SocketEnds(size_t flows,
                       const std::function<std::pair<int, int>()>& connected,
                       bool encrypted = false) {
  Ends ends;
  std::vector<int> sockets[2];
  for (size_t i = 0; i < flows; ++i) {
    const auto [one, other] = connected();
    sockets[0].push_back(one);
    sockets[1].push_back(other);
  }
  for (int side = 0; side < 2; ++side) {
    std::vector<std::string> keys;
    for (size_t i = 0; encrypted && i < flows; ++i) keys.push_back(ChannelKey(side, i));
    auto link = MakeTcpLink(sockets[side], keys);
    CHECK(link.ok());
    ends.links[side] = std::move(link.value());
    ends.bells[side] = std::make_unique<Doorbell>();
  }
  return ends;
}

// The library with which to test links over a fabric; empty: the loader searches.
inline std::string FabricLibrary() {
  const char* path = std::getenv("RINGJAX_FABRIC_LIBRARY");
  return path != nullptr ? path : "";
}

// A link between two endpoints in this process.
inline Ends FabricEnds(const std::string& provider, size_t slot_bytes, int slots,
                       bool encrypted = false) {
  Ends ends;
  FabricOptions options;
  options.library = FabricLibrary();
  options.provider = provider;
  options.source = "127.0.0.1";
  options.slot_bytes = slot_bytes;
  options.slots = slots;
  const auto [one, other] = UnixPair();
  std::thread makers[2];
  for (int side = 0; side < 2; ++side) {
    ends.bells[side] = std::make_unique<Doorbell>();
    makers[side] = std::thread([&, side, fd = side == 0 ? one : other] {
      const auto endpoint = FabricEndpoint::Open(options);
      CHECK(endpoint.ok());
      if (!endpoint.ok()) return;
      const std::string key = encrypted ? ChannelKey(side) : "";
      std::vector<FabricPeer> peers;
      peers.push_back({Descriptor(fd), key});
      auto links = MakeFabricLinks(endpoint.value(), std::move(peers), 20);
      if (!links.ok())
        return testing::Fail(__FILE__, __LINE__, links.status().message());
      ends.links[side] = std::move(links.value()[0]);
    });
  }
  for (std::thread& maker : makers) maker.join();
  return ends;
}

}  // namespace ringjax
