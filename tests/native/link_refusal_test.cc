// Input that a link must refuse or survive: nonsense in shared memory, memory that is
// not sealed, descriptors that are not sockets. Also the lifetime of descriptors.
// transport_test.cc tests the normal use of links.
#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <vector>

#include "check.h"
#include "link_ends.h"
#include "transport/link.h"
#include "transport/ring_link.h"

namespace ringjax {
namespace {

TEST(ImpossiblePositionsInSharedMemoryAreRefused) {
  constexpr size_t kRing = 4096;
  for (uint64_t claim : {uint64_t{kRing + 201}, uint64_t{1} << 40, ~uint64_t{0},
                         uint64_t{99}}) {  // 99: before the last position
    Ends bells = WithBells();
    const int memfd = MakeMemfd(ShmBytes(kRing));
    auto* pair = static_cast<RingPair*>(
        mmap(nullptr, ShmBytes(kRing), PROT_READ | PROT_WRITE, MAP_SHARED, memfd, 0));
    auto link = MakeShmLink(memfd, 0, kRing, dup(bells.bells[1]->fd()), getpid());
    CHECK(link.ok());
    std::vector<std::byte> data(3 * kRing);
    const iovec piece{data.data(), 200}, rest{data.data(), data.size()};
    CHECK_EQ(link.value()->TryWrite({&piece, 1}).value(), 200u);
    StoreShared(pair->positions[0].read, uint64_t{100});
    StoreShared(pair->positions[1].written, uint64_t{200});
    CHECK_EQ(link.value()->TryRead({&piece, 1}).value(), 200u);
    CHECK_EQ(link.value()->TryWrite({&rest, 1}).value(), kRing - 100);  // 100 are used

    StoreShared(pair->positions[1].written, claim);
    StoreShared(pair->positions[0].read, claim);
    const auto gone = [](const Status& s) { return s.code() == Code::kUnavailable; };
    CHECK(gone(link.value()->TryRead({&rest, 1}).status()));
    CHECK(gone(link.value()->Peek(64, 8).status()));
    CHECK(gone(link.value()->TryWrite({&rest, 1}).status()));
    CHECK(gone(link.value()->Reserve(64, 8).status()));
    std::vector<pollfd> fds;
    CHECK(link.value()->Arm(true, true, &fds));
    link.value().reset();
    munmap(pair, ShmBytes(kRing));
  }
}

bool IsOpen(int fd) { return fcntl(fd, F_GETFD) >= 0; }

TEST(UnsafeSharedMemoryIsRefusedAndClosed) {
  constexpr size_t kRing = 4096;
  const auto refused = [](int memfd, int side, size_t ring) {
    const int bell = MakeEventFd();
    const auto link = MakeShmLink(memfd, side, ring, bell, getpid());
    CHECK(link.status().code() == Code::kInvalidArgument);
    CHECK(!IsOpen(memfd) && !IsOpen(bell));
  };
  refused(MakeMemfd(ShmBytes(kRing) - 1), 0, kRing);
  refused(MakeMemfd(ShmBytes(kRing) + 4096), 0, kRing);
  refused(MakeMemfd(ShmBytes(kRing), F_SEAL_GROW), 0, kRing);
  refused(MakeMemfd(ShmBytes(kRing), F_SEAL_SHRINK), 0, kRing);
  refused(MakeMemfd(ShmBytes(kRing)), 2, kRing);
  refused(MakeMemfd(ShmBytes(3000)), 0, 3000);
  refused(MakeMemfd(ShmBytes(kRing)), 1, 2 * kRing);
}

TEST(SocketsThatCannotCarryALinkAreRefusedAndClosed) {
  CHECK(MakeTcpLink({}).status().code() == Code::kInvalidArgument);
  const int datagram = socket(AF_INET, SOCK_DGRAM, 0);
  const auto [one, other] = UnixPair();
  CHECK(MakeTcpLink({one, datagram}).status().code() == Code::kInvalidArgument);
  CHECK(!IsOpen(one) && !IsOpen(datagram));
  const int bell = MakeEventFd();
  CHECK(!MakeTcpLink({bell}).ok());
  close(other);
}

TEST(DescriptorsAreNotInherited) {
  const auto inherited = [](int fd) { return (fcntl(fd, F_GETFD) & FD_CLOEXEC) == 0; };
  const int bell = eventfd(0, 0);
  const Doorbell owner(bell);
  CHECK(!inherited(bell));
  const auto [one, other] = Loopback();
  CHECK(inherited(one));
  const auto link = MakeTcpLink({one});
  CHECK(!inherited(one));
  CHECK((fcntl(one, F_GETFL) & O_NONBLOCK) != 0);
  close(other);
}

TEST(ADoorbellRungManyTimesIsDrainedAtOnce) {
  Doorbell bell(MakeEventFd());
  bell.Drain();  // must not wait without a ring
  for (int i = 0; i < 1000; ++i) bell.Ring();
  bell.Drain();
  pollfd fd{bell.fd(), POLLIN, 0};
  CHECK_EQ(poll(&fd, 1, 0), 0);
  bell.Ring();
  CHECK_EQ(poll(&fd, 1, 0), 1);
}

}  // namespace
}  // namespace ringjax
