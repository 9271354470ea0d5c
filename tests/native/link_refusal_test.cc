// Input that a link must refuse or survive: nonsense in shared memory, memory that is
// not sealed, descriptors that are not sockets. Also the lifetime of descriptors.
// transport_test.cc tests the normal use of links.
#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <vector>

#include "check.h"
#include "link_ends.h"
#include "transport/event_fd.h"
#include "transport/host_memory.h"
#include "transport/link.h"

namespace ringjax {
namespace {

TEST(ImpossiblePositionsInSharedMemoryAreRefused) {
  constexpr size_t kRing = 4096;
  for (uint64_t claim : {uint64_t{kRing + 201}, uint64_t{1} << 40, ~uint64_t{0},
                         uint64_t{99}}) {  // 99: before the last position
    const Ends ends = ShmEnds(kRing);
    RingPair* const pair = SharedBy(ends);
    Link& link = *ends.links[0];
    std::vector<std::byte> data(3 * kRing);
    const iovec piece{data.data(), 200}, rest{data.data(), data.size()};
    CHECK_EQ(link.TryWrite({&piece, 1}).value(), 200u);
    StoreShared(pair->positions[0].read, uint64_t{100});
    StoreShared(pair->positions[1].written, uint64_t{200});
    CHECK_EQ(link.TryRead({&piece, 1}).value(), 200u);
    CHECK_EQ(link.TryWrite({&rest, 1}).value(), kRing - 100);  // 100 are used

    StoreShared(pair->positions[1].written, claim);
    StoreShared(pair->positions[0].read, claim);
    const auto gone = [](const Status& s) { return s.code() == Code::kUnavailable; };
    CHECK(gone(link.TryRead({&rest, 1}).status()));
    CHECK(gone(link.Peek(64, 8).status()));
    CHECK(gone(link.TryWrite({&rest, 1}).status()));
    CHECK(gone(link.Reserve(64, 8).status()));
    std::vector<pollfd> fds;
    CHECK(link.Arm(true, true, &fds));
  }
}

bool IsOpen(int fd) { return fcntl(fd, F_GETFD) >= 0; }

TEST(UnsafeSharedMemoryIsRefusedAndClosed) {
  const auto refused = [](int memfd, const HostLayout& layout) {
    CHECK(HostMemory::Map(memfd, layout).status().code() == Code::kInvalidArgument);
    CHECK(!IsOpen(memfd));
  };
  for (const size_t tile : {0, 8192}) {
    const HostLayout layout{2, 4096, tile};
    const size_t bytes = HostBytes(layout);
    refused(MakeMemfd(bytes - 1), layout);
    refused(MakeMemfd(bytes + 4096), layout);
    refused(MakeMemfd(bytes, F_SEAL_GROW), layout);
    refused(MakeMemfd(bytes, F_SEAL_SHRINK), layout);
    refused(MakeMemfd(bytes), {0, 4096, tile});
    refused(MakeMemfd(bytes), {3, 4096, tile});
    refused(MakeMemfd(bytes), {2, 8192, tile});
    refused(MakeMemfd(bytes), {2, 4096, tile + 4096});
    for (const HostLayout& odd : {HostLayout{2, 3000, tile}, {2, 4096, tile + 1}})
      refused(MakeMemfd(HostBytes(odd)), odd);
  }
}

TEST(ALinkToNoOtherRankOfTheMemoryIsRefused) {
  const auto bells = MakeDoorbells(3, 4096);
  for (const int peer : {-1, 1, 3})
    CHECK(MakeRingLink(bells[1].get(), peer).status().code() == Code::kInvalidArgument);
}

TEST(SocketsThatCannotCarryALinkAreRefusedAndClosed) {
  CHECK(MakeTcpLink({}).status().code() == Code::kInvalidArgument);
  const int datagram = socket(AF_INET, SOCK_DGRAM, 0);
  const auto [one, other] = UnixPair();
  CHECK(MakeTcpLink({one, datagram}).status().code() == Code::kInvalidArgument);
  CHECK(!IsOpen(one) && !IsOpen(datagram));
  CHECK(!MakeTcpLink({eventfd(0, 0)}).ok());
  close(other);
}

TEST(DescriptorsAreNotInherited) {
  const auto inherited = [](int fd) { return (fcntl(fd, F_GETFD) & FD_CLOEXEC) == 0; };
  const int bell = eventfd(0, 0);
  const EventFd owner(bell);
  CHECK(!inherited(bell));
  const auto [one, other] = Loopback();
  CHECK(inherited(one));
  const auto link = MakeTcpLink({one});
  CHECK(!inherited(one));
  CHECK((fcntl(one, F_GETFL) & O_NONBLOCK) != 0);
  close(other);
}

TEST(AnEventFdRungManyTimesIsDrainedAtOnce) {
  EventFd bell(eventfd(0, 0));
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
