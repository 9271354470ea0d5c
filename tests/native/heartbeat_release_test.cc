// The end of a heartbeat whose connections the next epoch uses, and a peer that
// continues in another epoch. The peers are plain sockets.
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "check.h"
#include "heartbeats.h"
#include "transport/descriptor.h"

namespace ringjax {
namespace {

using Type = ControlMessage::Type;

std::string MessageOf(Type type, const std::string& text = "") {
  ControlMessage message;
  message.type = type;
  message.from = 0;
  message.length = static_cast<uint32_t>(text.size());
  return WithHead(message, text);
}

const std::string kEpoch = MessageOf(Type::kEpoch, std::string(40, 'e'));

// The heartbeat of rank 0, with a neighbour at the other end of each socket in `ends`.
struct Star {
  explicit Star(int peers, double timeout = 60, const std::string& key = "") {
    std::vector<Heartbeat::Peer> all;
    for (int r = 1; r <= peers; ++r) {
      int pair[2];
      CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair), 0);
      all.push_back({r, pair[0], r == peers ? key : ""});
      ends.emplace_back(pair[1]);
      copies.emplace_back(dup(pair[0]));
    }
    heartbeat = std::make_shared<Heartbeat>(0, Nodes(peers + 1), all, 0.05, timeout,
                                            MakeEventFd(), MakeEventFd());
  }
  void Send(int peer, const std::string& bytes) {
    CHECK_EQ(write(ends[peer - 1].get(), bytes.data(), bytes.size()),
             static_cast<ssize_t>(bytes.size()));
  }
  // Waits until the heartbeat has left this many bytes of a peer unread.
  bool AwaitUnread(int peer, int bytes) {
    return Until([&] {
      int unread = -1;
      return ioctl(copies[peer - 1].get(), FIONREAD, &unread) == 0 && unread == bytes;
    });
  }
  // Returns the type of the last message that the peer receives before the end, which
  // must come although `copies` has a copy of the socket.
  Type LastMessage(int peer) {
    ControlMessage message;
    Type last{};
    std::string bytes;
    char piece[4096];
    for (ssize_t n; (n = read(ends[peer - 1].get(), piece, sizeof piece)) > 0;)
      bytes.append(piece, static_cast<size_t>(n));
    while (bytes.size() >= sizeof message) {
      std::memcpy(&message, bytes.data(), sizeof message);
      last = message.type;
      bytes.erase(0, sizeof message + message.length);
    }
    return last;
  }

  std::vector<Descriptor> ends, copies;
  std::shared_ptr<Heartbeat> heartbeat;
};

TEST(AHeartbeatReadsNothingBehindTheAnnouncementOfAnEpoch) {
  Star star(3, 0.3);
  star.Send(1, MessageOf(Type::kBeat) + kEpoch + MessageOf(Type::kBeat) + "rest");
  star.Send(2, kEpoch);
  CHECK(star.AwaitUnread(1, sizeof(ControlMessage) + 4));
  CHECK(star.AwaitUnread(2, 0));
  shutdown(star.ends[1].get(), SHUT_RDWR);
  // Neither silence nor the end of a connection is a loss after the announcement.
  CHECK(Until([&] { return !star.heartbeat->lost().empty(); }));
  for (const auto& [rank, why] : star.heartbeat->lost()) CHECK_EQ(rank, 3);
  CHECK(star.heartbeat->left().empty());
  const auto released = star.heartbeat->Release();
  CHECK_EQ(released.size(), size_t{2});
  for (const ReleasedConnection& c : released) {
    CHECK_EQ(c.input, kEpoch);
    const Descriptor ours(c.fd);
  }
}

TEST(ReleasedConnectionsStayOpen) {
  Star star(3);
  star.Send(1, MessageOf(Type::kBeat));
  star.Send(2, MessageOf(Type::kLeave));
  star.Send(3, MessageOf(Type::kEpoch, std::string(40, 'e')).substr(0, 57));
  for (const int peer : {1, 2, 3}) CHECK(star.AwaitUnread(peer, 0));
  const auto released = star.heartbeat->Release();
  CHECK(star.heartbeat->Release().empty());
  star.heartbeat->Stop();
  CHECK(star.heartbeat->lost().empty());
  CHECK_EQ(released.size(), size_t{2});
  if (released.size() != 2) return;
  const Descriptor one(released[0].fd), three(released[1].fd);
  CHECK_EQ(released[0].rank, 1);
  CHECK_EQ(released[1].rank, 3);
  CHECK_EQ(released[0].input, "");
  CHECK_EQ(released[1].input, kEpoch.substr(0, 57));
  CHECK_EQ(send(one.get(), "x", 1, MSG_NOSIGNAL), ssize_t{1});
  // The peer that has left sees the end, as if this rank had shut down.
  CHECK(star.LastMessage(2) == Type::kLeave);
}

TEST(EncryptedConnectionsEndInsteadOfBeingReleased) {
  if (!WhyNoCipher().empty()) return;
  Star star(2, 60, std::string(kChannelKeyBytes, 'k'));
  const auto released = star.heartbeat->Release();
  CHECK_EQ(released.size(), size_t{1});
  for (const ReleasedConnection& c : released) {
    CHECK_EQ(c.rank, 1);
    const Descriptor ours(c.fd);
  }
  char piece[4096];
  ssize_t n;
  while ((n = read(star.ends[1].get(), piece, sizeof piece)) > 0) {
  }
  CHECK_EQ(n, ssize_t{0});
}

TEST(AShortAnnouncementIsGarbage) {
  Star star(1);
  star.Send(1, MessageOf(Type::kEpoch, std::string(39, 'e')));
  CHECK(Until([&] { return !star.heartbeat->lost().empty(); }));
  star.heartbeat->Stop();
}

}  // namespace
}  // namespace ringjax
