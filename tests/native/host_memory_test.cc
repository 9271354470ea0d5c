// The memory that ranks of a host share: what of it is allocated, and the process ids
// in it. Also the doorbells, by which ranks that share the memory wake each other.
// link_refusal_test.cc tests which memory is refused.
#include "transport/host_memory.h"

#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <thread>

#include "check.h"
#include "link_ends.h"

namespace ringjax {
namespace {

TEST(ThePagesOfAPairAreAllocatedWhenItIsFirstUsed) {
  constexpr size_t kRing = 4 << 20;  // longer than a huge page
  const HostLayout layout{3, kRing, 4096};
  const int fd = MakeMemfd(HostBytes(layout));
  const auto memory = HostMemory::Map(fd, layout).value();
  const auto pairs = [fd] {
    struct stat info{};
    CHECK_EQ(fstat(fd, &info), 0);
    return static_cast<size_t>(info.st_blocks) * 512 / (2 * kRing);
  };
  CHECK_EQ(pairs(), 0u);
  Doorbell zero(memory, 0, "a"), one(memory, 1, "a");
  const auto link = MakeRingLink(&zero, 1);
  CHECK_EQ(pairs(), 1u);
  const auto same = MakeRingLink(&one, 0);
  CHECK_EQ(pairs(), 1u);
  const auto other = MakeRingLink(&zero, 2);
  CHECK_EQ(pairs(), 2u);
}

// The ranks have different rings, so no link writes where another does.
TEST(NoTwoPairsShareMemory) {
  constexpr int kRanks = 6;
  const HostLayout layout{kRanks, 4096, 4096};
  const auto memory = HostMemory::Local(layout);
  std::vector<std::byte*> blocks;
  for (int high = 1; high < kRanks; ++high)
    for (int low = 0; low < high; ++low) {
      blocks.push_back(memory->Pair(low, high).value());
      CHECK(memory->Pair(high, low).value() == blocks.back());
    }
  std::sort(blocks.begin(), blocks.end());
  const auto* const start = reinterpret_cast<std::byte*>(&memory->words(0));
  CHECK(blocks.front() >= start + FixedHostBytes(layout));
  blocks.push_back(memory->segment());
  CHECK(blocks.back() >= reinterpret_cast<std::byte*>(&memory->words(kRanks)));
  blocks.back() = const_cast<std::byte*>(start) + HostBytes(layout);
  for (size_t i = 0; i + 1 < blocks.size(); ++i)
    CHECK(blocks[i + 1] - blocks[i] >= static_cast<long>(kPairHeader + 2 * 4096));
}

// A rank that names a process without the memory could make this process read the
// memory of a stranger.
TEST(OnlyAProcessThatHasMappedTheMemoryIsARank) {
  const HostLayout layout{2, 4096, 0};
  const auto memory = HostMemory::Map(MakeMemfd(HostBytes(layout)), layout).value();
  const auto accepted = [&memory](pid_t process) {
    StoreShared(memory->words(1).process, static_cast<int32_t>(process));
    return memory->ProcessOf(1);
  };
  CHECK_EQ(memory->ProcessOf(1), 0);
  const Doorbell bell(memory, 0, "a");
  CHECK_EQ(memory->ProcessOf(0), getpid());
  int ends[2];
  CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
  char byte = 'x';
  const pid_t child = fork();
  if (child == 0) {
    close(ends[0]);
    const bool told = read(ends[1], &byte, 1) == 1 &&
                      munmap(&memory->words(0), HostBytes(layout)) == 0 &&
                      write(ends[1], &byte, 1) == 1;
    _exit(told && read(ends[1], &byte, 1) == 0 ? 0 : 1);
  }
  close(ends[1]);
  CHECK_EQ(accepted(child), child);
  CHECK(write(ends[0], &byte, 1) == 1 && read(ends[0], &byte, 1) == 1);
  CHECK_EQ(accepted(child), 0);
  close(ends[0]);
  int status = -1;
  CHECK_EQ(waitpid(child, &status, 0), child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  for (const pid_t nobody : {child, 0, -1, -getpid()}) CHECK_EQ(accepted(nobody), 0);
}

// -- doorbells

constexpr int kForever = 1'000'000;  // milliseconds: a lost ring ends the test program

std::vector<pollfd> Polled(bool polls) {
  if (polls) return {{-1, POLLIN, 0}};
  return {};
}

void WithDoorbells(const std::function<void(Doorbell*, Doorbell*, bool)>& body) {
  for (const auto& make : {LocalEnds, ShmEnds})
    for (const bool polls : {false, true}) {
      const Ends ends = make(64, 0);
      body(ends.bells[0].get(), ends.bells[1].get(), polls);
    }
}

TEST(ADoorbellRungWhileItsOwnerIsAwakeEndsOneSleep) {
  WithDoorbells([](Doorbell* own, Doorbell* peer, bool polls) {
    const auto sleeps = [own, polls](int ms) {
      std::vector<pollfd> fds = Polled(polls);
      const auto start = Clock::now();
      own->Sleep(&fds, ms);
      return Clock::now() - start >= std::chrono::milliseconds(ms);
    };
    CHECK(sleeps(20));
    for (int i = 0; i < 1000; ++i) i % 2 ? own->Ring() : peer->RingPeer(0);
    CHECK(!sleeps(kForever));
    CHECK(sleeps(20));
  });
}

TEST(ADescriptorEndsTheSleepOfADoorbell) {
  const auto [one, other] = UnixPair();
  CHECK_EQ(write(other, "x", 1), 1);
  Doorbell bell;
  std::vector<pollfd> fds{{one, POLLIN, 0}};
  bell.Sleep(&fds, kForever);
  CHECK_EQ(fds[0].revents, POLLIN);
  close(one);
  close(other);
}

// Runs `wake` once the owner of `bell` is asleep, or about to be.
void Wakes(Doorbell* bell, bool polls, const std::function<void()>& wake) {
  std::thread owner([bell, polls] {
    std::vector<pollfd> fds = Polled(polls);
    bell->Sleep(&fds, kForever);
  });
  uint32_t& asleep = bell->words(bell->index()).asleep;
  const uint32_t expected = polls ? Doorbell::kInPoll : Doorbell::kInFutex;
  while (LoadShared(asleep) != expected) std::this_thread::yield();
  wake();
  owner.join();
  CHECK_EQ(LoadShared(asleep), uint32_t{Doorbell::kAwake});
}

TEST(ADoorbellWakesItsOwner) {
  WithDoorbells([](Doorbell* own, Doorbell* peer, bool polls) {
    for (int i = 0; i < 200; ++i) {
      Wakes(own, polls, [own] { own->Ring(); });
      Wakes(own, polls, [peer] { peer->RingPeer(0); });
      polls = i % 3 ? polls : !polls;
    }
    Wakes(own, polls, [peer] { peer->Close(); });
    CHECK_EQ(LoadShared(own->words(1).closed), 1u);
    peer->Close();  // closed already, so it rings no more
    CHECK_EQ(LoadShared(own->words(0).closed), 0u);
  });
}

TEST(TheEndOfADoorbellWakesAllPeersThatSleep) {
  auto bells = MakeDoorbells(3, 64);
  Wakes(bells[0].get(), false,
        [&bells] { Wakes(bells[2].get(), true, [&bells] { bells[1].reset(); }); });
}

// The name of a socket belongs to one rank. Another owner of the name keeps the rank
// from sleeping for long, but not from running.
TEST(ADoorbellWhoseSocketCannotBeOpenedSleepsBriefly) {
  const auto memory = HostMemory::Local({2, 64, 0});
  const std::string name = "taken-" + std::to_string(getpid());
  Doorbell owner(memory, 0, name), late(memory, 0, name);
  CHECK(owner.Open().ok() && owner.Open().ok());
  const Status status = late.Open();
  CHECK(status.code() == Code::kUnavailable);
  CHECK(status.message().find("in use") != std::string::npos);
  std::vector<pollfd> fds = Polled(true);
  late.Sleep(&fds, kForever);
}

}  // namespace
}  // namespace ringjax
