// Links over a fabric: messages that no ringjax sends, peers that end, children, and
// links that are made without waiting. transport_test.cc tests their normal use.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstring>
#include <string>
#include <thread>

#include "check.h"
#include "link_ends.h"
#include "transport/fabric_link.h"

namespace ringjax {
namespace {

using FabricClock = std::chrono::steady_clock;

constexpr std::chrono::seconds kLongest(20);

FabricOptions LocalFabric(const std::string& provider = "tcp") {
  FabricOptions options;
  options.library = FabricLibrary();
  options.provider = provider;
  options.source = "127.0.0.1";
  options.slot_bytes = 16 << 10;
  options.slots = 4;
  return options;
}

bool HasFabric() {
  const FabricInfo found = ProbeFabric(LocalFabric());
  if (!found.status.ok()) std::cerr << "  skipped: " << found.status.message() << "\n";
  return found.status.ok();
}

std::unique_ptr<Link> MakeLink(std::shared_ptr<FabricEndpoint> endpoint, int lifeline,
                               double seconds, const std::string& key = "") {
  std::vector<FabricPeer> peers;
  peers.push_back({Descriptor(lifeline), key});
  auto links = MakeFabricLinks(endpoint, std::move(peers), seconds);
  CHECK(links.ok());
  return links.ok() ? std::move(links.value()[0]) : nullptr;
}

// The other end of a link, which sends what it is told to.
class RawPeer : FabricEndpoint::Owner {
 public:
  explicit RawPeer(int lifeline, const FabricOptions& options = LocalFabric())
      : endpoint_(FabricEndpoint::Open(options).value()), lifeline_(lifeline) {
    memory_ = std::move(SlotMemory::Map(endpoint_.get(), 64 << 10).value());
    own_.protocol = endpoint_->protocol();
    own_.slot_bytes = options.slot_bytes;
    own_.slots = static_cast<uint64_t>(options.slots);
    own_.tag = endpoint_->NewTag();
    own_.address_bytes = endpoint_->address().size();
    std::memcpy(own_.address.data(), endpoint_->address().data(), own_.address_bytes);
  }
  ~RawPeer() {
    for (auto* each : {&send_, &receive_}) endpoint_->Cancel(each);
    while (send_.under_way || receive_.under_way) endpoint_->Poll();
  }

  FabricGreeting& own() { return own_; }
  void Greet() { CHECK(write(lifeline_.get(), &own_, sizeof own_) == sizeof own_); }
  void Meet() {
    Greet();
    FabricGreeting link;
    CHECK(recv(lifeline_.get(), &link, sizeof link, MSG_WAITALL) == sizeof link);
    tag_ = link.tag;
    peer_ = endpoint_->Insert({link.address.data(), link.address_bytes}).value();
    // The hello of the link.
    receive_.owner = send_.owner = this;
    std::byte* const at = memory_->Take(8 << 10);
    CHECK(endpoint_->Receive(at, 8 << 10, memory_->registered(), own_.tag, &receive_) ==
          FabricEndpoint::Posted::kYes);
  }
  // Sends to `link` a message whose header may be nonsense, and `bytes` bytes behind
  // it.
  void Send(Link* link, const FabricHeader& header, size_t bytes, SlotClass kind) {
    std::byte* const at = memory_->Take(sizeof header + 9000);
    std::memcpy(at, &header, sizeof header);
    const auto send = [&] {
      return endpoint_->Send(peer_, at, sizeof header + bytes, memory_->registered(),
                             tag_ | static_cast<uint64_t>(kind), &send_);
    };
    auto posted = send();
    for (const auto start = FabricClock::now();
         posted == FabricEndpoint::Posted::kLater &&
         FabricClock::now() - start < kLongest;) {  // it is connecting
      CHECK(link->Peek(1, 1).ok());
      Poll();
      posted = send();
    }
    CHECK(posted == FabricEndpoint::Posted::kYes);
  }
  void Poll() { endpoint_->Poll(); }

 private:
  void Completed(FabricEndpoint::Operation*, const Status&) override {}

  std::shared_ptr<FabricEndpoint> endpoint_;
  std::unique_ptr<SlotMemory> memory_;
  Descriptor lifeline_;
  FabricGreeting own_;
  uint64_t tag_ = 0, peer_ = 0;
  FabricEndpoint::Operation send_, receive_;
};

// Reads until the link fails, for at most kLongest.
Status ReadUntilBroken(Link* link, RawPeer* peer) {
  const auto start = FabricClock::now();
  while (FabricClock::now() - start < kLongest) {
    const auto bytes = link->Peek(64, 1);
    if (!bytes.ok()) return bytes.status();
    link->Consume(bytes.value().size());
    peer->Poll();
  }
  return OkStatus();
}

// Returns how a link fails whose peer sends this as its first message.
Status Reaction(const FabricHeader& header, size_t bytes, SlotClass kind = kSmallSlots,
                const std::string& key = "") {
  const auto [one, other] = UnixPair();
  const auto link = MakeLink(FabricEndpoint::Open(LocalFabric()).value(), one, 0, key);
  RawPeer peer(other);
  peer.own().sealed = !key.empty();
  peer.Meet();
  CHECK(link->Peek(1, 1).ok());
  peer.Send(link.get(), header, bytes, kind);
  const Status status = ReadUntilBroken(link.get(), &peer);
  CHECK(status.code() == Code::kUnavailable);
  CHECK(link->Flush().status().code() == Code::kUnavailable);
  CHECK(link->Reserve(8, 8).status().code() == Code::kUnavailable);
  return status;
}

bool Says(const Status& status, const std::string& words) {
  if (status.message().find(words) != std::string::npos) return true;
  std::cerr << "  '" << status.message() << "' lacks '" << words << "'\n";
  return false;
}

TEST(DamagedMessagesOverAFabricBreakTheLink) {
  if (!HasFabric()) return;
  constexpr uint32_t kHello = FabricMessages::kHello;
  CHECK(Says(Reaction({1, 0, 0, kHello, {}, 0}, 0), "missing"));
  CHECK(Says(Reaction({0, 99, 0, kHello, {}, 0}, 0), "missing"));
  CHECK(Says(Reaction({0, ~0u, 0, kHello, {}, 0}, 0), "missing"));
  CHECK(Says(Reaction({0, 0, 8, kHello, {}, 0}, 0), "length"));
  CHECK(Says(Reaction({0, 0, ~0u, kHello, {}, 0}, 100), "length"));
  CHECK(Says(Reaction({0, 0, 0, kHello, {}, 0}, 100), "length"));
  CHECK(Says(Reaction({0, 0, 0, 1u << 20, {}, 0}, 0), "flag"));
  CHECK(Says(Reaction({0, 0, 0, kHello, {}, 7}, 0), "flag"));
  CHECK(Says(Reaction({0, 0, 0, kHello, {5, 0}, 0}, 0), "more slots"));
  CHECK(Says(Reaction({0, 0, 0, kHello, {~0u, 0}, 0}, 0), "more slots"));
  CHECK(Says(Reaction({0, 0, 0, kHello, {0, 1}, 0}, 0), "more slots"));
  CHECK(Says(Reaction({0, 0, 16, 0, {}, 0}, 16, kNotes), "payload"));
  // The provider refuses a message that is longer than its slot.
  CHECK(!Reaction({0, 0, 8900, kHello, {}, 0}, 8900).message().empty());
  // An authenticated message cannot be forged.
  if (WhyNoCipher().empty())
    CHECK(Says(Reaction({0, 0, 16, kHello, {}, 0}, 32, kSmallSlots, ChannelKey(0)),
               "encrypted"));
}

TEST(WrongGreetingsAreRefused) {
  if (!HasFabric()) return;
  const auto reaction = [](const std::function<void(FabricGreeting*)>& change) {
    const auto [one, other] = UnixPair();
    const auto link = MakeLink(FabricEndpoint::Open(LocalFabric()).value(), one, 0);
    RawPeer peer(other);
    change(&peer.own());
    peer.Greet();
    return ReadUntilBroken(link.get(), &peer);
  };
  CHECK(Says(reaction([](FabricGreeting* g) { g->magic = 1; }), "unknown format"));
  CHECK(Says(reaction([](FabricGreeting* g) { g->protocol += 1; }), "protocol"));
  CHECK(Says(reaction([](FabricGreeting* g) { g->slots = 9; }), "9 slots"));
  CHECK(Says(reaction([](FabricGreeting* g) { g->sealed = 1; }), "encrypts"));
  CHECK(Says(reaction([](FabricGreeting* g) { g->address_bytes = 513; }), "address"));
}

// Sends and receives `bytes` bytes.
bool Swap(Link* link, size_t bytes) {
  std::vector<std::byte> out(bytes), in(bytes);
  size_t sent = 0, received = 0;
  for (bool flushed = false; sent < bytes || received < bytes || !flushed;) {
    const iovec rest{out.data() + sent, bytes - sent};
    const auto wrote = sent < bytes ? link->TryWrite({&rest, 1}) : size_t{0};
    const iovec room{in.data() + received, bytes - received};
    const auto read = received < bytes ? link->TryRead({&room, 1}) : size_t{0};
    if (!wrote.ok() || !read.ok()) return false;
    sent += wrote.value();
    received += read.value();
    const auto all = link->Flush();
    if (!all.ok()) return false;
    flushed = all.value();
  }
  return true;
}

// Waits until the link fails, as the executor does.
Status WaitUntilBroken(Link* link, bool reads) {
  Doorbell bell;
  std::vector<std::byte> data(64 << 10);
  const iovec piece{data.data(), data.size()};
  const auto start = FabricClock::now();
  while (FabricClock::now() - start < kLongest) {
    const auto moved = reads ? link->TryRead({&piece, 1}) : link->TryWrite({&piece, 1});
    if (!moved.ok()) return moved.status();
    std::vector<pollfd> fds;
    if (moved.value() == 0 && !link->Arm(reads, !reads, &fds)) bell.Sleep(&fds, 1000);
  }
  return OkStatus();
}

// Runs in the process that is killed.
[[noreturn]] void ExchangeAndWait(const std::string& provider, int lifeline) {
  const auto endpoint = FabricEndpoint::Open(LocalFabric(provider));
  if (!endpoint.ok()) _exit(1);
  const auto link = MakeLink(endpoint.value(), lifeline, 20);
  if (!link || !Swap(link.get(), 300'000)) _exit(2);
  while (true) pause();
}

TEST(AKilledPeerIsNoticed) {
  for (const std::string provider : {"tcp", "tcp;ofi_rxm"})
    for (const bool reads : {true, false}) {
      const auto [one, other] = UnixPair();
      const pid_t child = fork();
      if (child == 0) {
        close(one);
        if (!ProbeFabric(LocalFabric(provider)).status.ok()) _exit(0);
        ExchangeAndWait(provider, other);
      }
      close(other);
      if (!ProbeFabric(LocalFabric(provider)).status.ok()) {
        std::cerr << "  skipped: no libfabric with " << provider << "\n";
        close(one);
        waitpid(child, nullptr, 0);
        continue;
      }
      const auto endpoint = FabricEndpoint::Open(LocalFabric(provider)).value();
      const auto link = MakeLink(endpoint, one, 20);
      CHECK(link && Swap(link.get(), 300'000));
      std::thread killer([child = child] {
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
        kill(child, SIGKILL);
        waitpid(child, nullptr, 0);
      });
      const Status status = WaitUntilBroken(link.get(), reads);
      killer.join();
      CHECK(status.code() == Code::kUnavailable);
    }
}

TEST(AChildOfARankChangesNoLink) {
  if (!HasFabric()) return;
  Ends ends = FabricEnds("tcp", 16 << 10, 4);
  const auto swap_both = [&ends] {
    std::thread other([&ends] { CHECK(Swap(ends.links[1].get(), 200'000)); });
    CHECK(Swap(ends.links[0].get(), 200'000));
    other.join();
  };
  swap_both();
  const pid_t child = fork();
  if (child == 0) {
    for (auto& link : ends.links) link.reset();
    _exit(0);
  }
  int ended = -1;
  waitpid(child, &ended, 0);
  CHECK_EQ(ended, 0);
  swap_both();
}

// Two ranks make their ends in the middle of calls, in any order, so neither may wait.
TEST(ALinkMadeWithoutWaitingConnectsWhenItIsUsed) {
  if (!HasFabric()) return;
  const auto [one, other] = UnixPair();
  const auto first = MakeLink(FabricEndpoint::Open(LocalFabric()).value(), one, 0);
  const iovec none{nullptr, 0};
  CHECK_EQ(first->TryWrite({&none, 1}).value(), 0u);
  std::vector<pollfd> fds;
  CHECK(!first->Arm(true, true, &fds));
  std::thread later([fd = other] {
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    const auto second = MakeLink(FabricEndpoint::Open(LocalFabric()).value(), fd, 0);
    CHECK(Swap(second.get(), 500'000));
  });
  CHECK(Swap(first.get(), 500'000));
  later.join();
}

// Sends a byte back and forth over a link.
bool Echo(Link* link, int rounds, bool begins) {
  Doorbell bell;
  std::byte data{1};
  const iovec piece{&data, 1};
  for (int half = 0; half < 2 * rounds; ++half) {
    const bool writes = (half % 2 == 0) == begins;
    while (true) {
      const auto n = writes ? link->TryWrite({&piece, 1}) : link->TryRead({&piece, 1});
      if (!n.ok()) return false;
      if (n.value() > 0) break;
      std::vector<pollfd> fds;
      if (!link->Arm(!writes, writes, &fds)) bell.Sleep(&fds, 1000);
    }
  }
  return true;
}

// The links of an endpoint share its completions: while one link is armed, the arming
// of the next one may find what the first one waits for.
TEST(LinksOfOneEndpointWakeEachOther) {
  if (!HasFabric()) return;
  constexpr int kPeers = 2, kRounds = 2000;
  constexpr std::chrono::seconds kLost(10);
  std::vector<FabricPeer> peers;
  std::vector<std::thread> others;
  for (int i = 0; i < kPeers; ++i) {
    const auto [one, other] = UnixPair();
    peers.push_back({Descriptor(one), ""});
    others.emplace_back([fd = other] {
      const auto link = MakeLink(FabricEndpoint::Open(LocalFabric()).value(), fd, 20);
      CHECK(link && Echo(link.get(), kRounds, true));
    });
  }
  const auto endpoint = FabricEndpoint::Open(LocalFabric()).value();
  const auto links = std::move(MakeFabricLinks(endpoint, std::move(peers), 20).value());
  Doorbell bell;
  std::byte data{1};
  const iovec piece{&data, 1};
  std::vector<int> left(kPeers, kRounds);
  const auto any_left = [&left] { return left[0] + left[1] > 0; };
  while (any_left() && testing::failures == 0) {
    bool moved = false, ready = false;
    for (int i = 0; i < kPeers; ++i) {
      if (left[i] == 0 || links[i]->TryRead({&piece, 1}).value() == 0) continue;
      while (links[i]->TryWrite({&piece, 1}).value() == 0) {
      }
      moved = true;
      --left[i];
    }
    if (moved) continue;
    std::vector<pollfd> fds;
    for (int i = 0; i < kPeers; ++i)
      if (left[i] > 0) ready |= links[i]->Arm(true, false, &fds);
    const auto start = FabricClock::now();
    if (!ready) bell.Sleep(&fds, static_cast<int>(kLost.count() * 1000));
    CHECK(FabricClock::now() - start < kLost);
  }
  for (std::thread& other : others) other.join();
}

// The end of an endpoint takes away what its peers have not received: libfabric closes
// its sockets, and the kernel drops what they hold if one of them has unread bytes.
TEST(AClosedLinkWaitsForASlowReader) {
  if (!HasFabric()) return;
  constexpr size_t kBytes = 60'000;
  for (int round = 0; round < 5; ++round) {
    Ends ends = FabricEnds("tcp", 16 << 10, 4);
    std::thread writer([link = std::move(ends.links[1])]() mutable {
      CHECK(Swap(link.get(), kBytes));
      std::vector<std::byte> last(kBytes);
      for (size_t sent = 0; sent < last.size();) {
        const iovec rest{last.data() + sent, last.size() - sent};
        sent += link->TryWrite({&rest, 1}).value();
      }
      const auto start = FabricClock::now();
      while (!link->Close() && FabricClock::now() - start < kLongest)
        std::this_thread::yield();
      link.reset();
    });
    Link* const reader = ends.links[0].get();
    CHECK(Swap(reader, kBytes));
    std::this_thread::sleep_for(std::chrono::milliseconds(100 * round));
    std::vector<std::byte> in(kBytes);
    size_t received = 0;
    Status status;
    while (status.ok()) {
      const iovec room{in.data() + received, kBytes - received};
      const auto read = reader->TryRead({&room, 1});
      status = read.status();
      received += read.ok() ? read.value() : 0;
      if (received == kBytes) break;
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    CHECK_EQ(received, kBytes);
    CHECK(WaitUntilBroken(reader, true).code() == Code::kUnavailable);
    CHECK(reader->Close());
    writer.join();
  }
}

TEST(APeerThatDoesNotAnswerIsADeadline) {
  if (!HasFabric()) return;
  const auto [one, other] = UnixPair();
  std::vector<FabricPeer> peers;
  peers.push_back({Descriptor(one), ""});
  const auto endpoint = FabricEndpoint::Open(LocalFabric()).value();
  const Status late = MakeFabricLinks(endpoint, std::move(peers), 0.1).status();
  CHECK(late.code() == Code::kDeadlineExceeded);
  CHECK_EQ(late.rank(), 0);
  close(other);
}

TEST(AProviderThatIsMissingIsNamed) {
  if (!HasFabric()) return;
  const Status missing = ProbeFabric(LocalFabric("no_such_card")).status;
  CHECK(missing.code() == Code::kFailedPrecondition);
  CHECK(Says(missing, "'no_such_card'"));
  CHECK(Says(missing, "tcp"));
  CHECK(!FabricEndpoint::Open(LocalFabric("tcp:no_such_domain")).ok());
  FabricOptions odd = LocalFabric();
  odd.slot_bytes = 1000;
  CHECK(FabricEndpoint::Open(odd).status().code() == Code::kInvalidArgument);
}

}  // namespace
}  // namespace ringjax
