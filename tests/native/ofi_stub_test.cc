// Links over the stub of libfabric (tests/ofi_stub), which does what cards do and
// libfabric's provider `tcp` never does. Each test runs in a process of its own,
// because a process opens one libfabric only, and the stub ends a process that breaks a
// rule.
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <thread>

#include "check.h"
#include "link_ends.h"
#include "transport/link.h"

namespace ringjax {
namespace {

using Variables = std::map<std::string, std::string>;

// Starts this program again for the test `name` alone, with the stub. Returns true in
// that process, which then runs the test's body.
bool OnStub(const std::string& name, const Variables& variables = {}) {
  constexpr char kStarted[] = "RINGJAX_STUB_TEST";
  if (std::getenv(kStarted) != nullptr) return true;
  std::vector<std::string> environment = {
      std::string(kStarted) + "=1", "RINGJAX_TEST_PROVIDER=stub",
      "RINGJAX_TEST_ROUNDS=500", "RINGJAX_FABRIC_LIBRARY=" RINGJAX_OFI_STUB};
  for (const auto& [key, value] : variables) environment.push_back(key + "=" + value);
  for (char** one = environ; *one != nullptr; ++one) environment.push_back(*one);
  std::vector<char*> pointers;
  for (std::string& one : environment) pointers.push_back(one.data());
  pointers.push_back(nullptr);
  std::string program = "/proc/self/exe", filter = "=" + name;
  char* const words[] = {program.data(), filter.data(), nullptr};
  pid_t child = 0;
  CHECK_EQ(
      posix_spawn(&child, program.data(), nullptr, nullptr, words, pointers.data()), 0);
  int status = -1;
  CHECK_EQ(waitpid(child, &status, 0), child);
  CHECK_EQ(status, 0);
  return false;
}

FabricInfo Probe(const std::string& provider, int local_rank,
                 const std::string& source) {
  FabricOptions options;
  options.library = RINGJAX_OFI_STUB;
  options.provider = provider;
  options.local_rank = local_rank;
  options.source = source;
  return ProbeFabric(options);
}

// Runs the tests of transport_test.cc, whose transport is the stub in this process.
void RunTransportTests() {
  CHECK_EQ(Probe("stub", 0, "").provider.substr(0, 4), "stub");
  const auto tests = testing::Tests();
  for (const auto& test : tests)
    for (const std::string_view name :
         {"StreamsOfOddMessagesArriveUnchanged", "StreamsOfLongMessagesArriveUnchanged",
          "RegionsOfEvenMessagesAreAligned", "NoWakeUpIsLost",
          "NoWakeUpIsLostWhenTheRingIsFull", "VeryManyPiecesAreReadAndWritten",
          "AFragmentOfAnElementWakesNoReader",
          "AClosedEndIsUnavailableAfterItsLastBytes"}) {
      if (test.name != name) continue;
      test.body();
      if (testing::failures > 0) return testing::Fail(__FILE__, __LINE__, test.name);
    }
}

TEST(LinksCrossAStubThatRefusesOperationsAndSendsOnlyWhenPolled) {
  const Variables card = {{"OFI_STUB_EAGAIN", "30"}, {"OFI_STUB_LAZY", "1"}};
  if (OnStub(__func__, card)) RunTransportTests();
}

TEST(LinksCrossAStubThatCompletesOutOfOrder) {
  if (OnStub(__func__, {{"OFI_STUB_REORDER", "1"}})) RunTransportTests();
}

TEST(LinksCrossAStubThatIsBusyBeforeItSleeps) {
  const Variables card = {{"OFI_STUB_BUSY_WAITS", "5"}, {"OFI_STUB_MR", "none"}};
  if (OnStub(__func__, card)) RunTransportTests();
}

TEST(LinksCrossAStubWithoutADescriptor) {
  if (OnStub(__func__, {{"OFI_STUB_WAIT", "none"}})) RunTransportTests();
}

// FI_GETWAIT fails although the queue was opened with a descriptor.
TEST(LinksCrossAStubThatBindsMemoryToEndpoints) {
  const Variables card = {{"OFI_STUB_MR", "local,endpoint"},
                          {"OFI_STUB_TAGS", "48"},
                          {"OFI_STUB_INJECT", "0"},
                          {"OFI_STUB_TX", "2"},
                          {"OFI_STUB_WAIT", "late"}};
  if (OnStub(__func__, card)) RunTransportTests();
}

TEST(LinksCrossAStubThatDoesAllOfThis) {
  const Variables card = {{"OFI_STUB_EAGAIN", "20"},
                          {"OFI_STUB_REORDER", "1"},
                          {"OFI_STUB_BUSY_WAITS", "3"},
                          {"OFI_STUB_LAZY", "1"},
                          {"OFI_STUB_MR", "local,endpoint,prov_key"},
                          {"OFI_STUB_PROVIDERS", "stub;ofi_rxm"}};
  if (OnStub(__func__, card)) RunTransportTests();
}

// Returns a link whose first end has a card with these variables.
Ends UnequalEnds(const Variables& variables, bool encrypted = false) {
  FabricOptions options;
  options.library = RINGJAX_OFI_STUB;
  options.provider = "stub";
  std::shared_ptr<FabricEndpoint> endpoints[2];
  for (int side = 0; side < 2; ++side) {
    for (const auto& [key, value] : variables)
      side == 0 ? setenv(key.c_str(), value.c_str(), 1) : unsetenv(key.c_str());
    const auto opened = FabricEndpoint::Open(options);
    CHECK(opened.ok());
    if (opened.ok()) endpoints[side] = opened.value();
  }
  Ends ends;
  const auto [one, other] = UnixPair();
  std::thread makers[2];
  for (int side = 0; side < 2; ++side) {
    ends.bells[side] = std::make_unique<Doorbell>();
    makers[side] = std::thread([&, side, fd = side == 0 ? one : other] {
      const std::string key = encrypted ? ChannelKey(side) : "";
      std::vector<FabricPeer> peers;
      peers.push_back({Descriptor(fd), key});
      auto links = MakeFabricLinks(endpoints[side], std::move(peers), 20);
      CHECK(links.ok());
      if (links.ok()) ends.links[side] = std::move(links.value()[0]);
    });
  }
  for (std::thread& maker : makers) maker.join();
  return ends;
}

// Writes at one end and reads at the other until an end fails or all has arrived.
// Returns the status of the end that fails.
Status Stream(Ends* ends, int writer, size_t total, double seconds = 20) {
  constexpr size_t kAtOnce = 100'000;
  std::vector<std::byte> bytes(kAtOnce), got(kAtOnce);
  const auto start = Clock::now();
  for (size_t sent = 0, received = 0; received < total;) {
    const iovec out{bytes.data(), std::min(kAtOnce, total - sent)};
    const iovec in{got.data(), kAtOnce};
    if (Link* const link = ends->links[writer].get()) {
      const auto wrote = link->TryWrite({&out, 1});
      if (!wrote.ok()) return wrote.status();
      sent += wrote.value();
    }
    if (Link* const link = ends->links[1 - writer].get()) {
      const auto read = link->TryRead({&in, 1});
      if (!read.ok()) return read.status();
      received += read.value();
    }
    if (Clock::now() - start > std::chrono::duration<double>(seconds))
      return Status(Code::kDeadlineExceeded, "nothing moves");
  }
  return OkStatus();
}

bool Has(const Status& status, std::string_view words) {
  const bool has = status.message().find(words) != std::string::npos;
  if (!has) std::cerr << "  the message is: " << status.message() << "\n";
  return has;
}

TEST(AFailedSendBreaksTheLinkAndSaysWhy) {
  if (!OnStub(__func__)) return;
  Ends ends = UnequalEnds({{"OFI_STUB_FAIL", "send:5"}});
  const Status status = Stream(&ends, 0, 10'000'000);
  CHECK(status.code() == Code::kUnavailable);
  CHECK(Has(status, "cannot be reached over stub: No route to host") &&
        Has(status, "code 12 of the card"));
}

TEST(AFailedReceiveBreaksTheLinkAndSaysWhy) {
  if (!OnStub(__func__)) return;
  Ends ends = UnequalEnds({{"OFI_STUB_FAIL", "receive:5"}});
  const Status status = Stream(&ends, 1, 10'000'000);
  CHECK(status.code() == Code::kUnavailable);
  CHECK(Has(status, "Input/output error"));
}

// Only the caller knows for how long it wants to wait.
TEST(ASilentPeerIsNoErrorOfTheLink) {
  if (!OnStub(__func__)) return;
  Ends ends = UnequalEnds({{"OFI_STUB_SILENT_AFTER", "3"}});
  CHECK(Stream(&ends, 0, 3'000'000, 0.2).code() == Code::kDeadlineExceeded);
  ends.links[0].reset();  // returns although its messages never arrive
  const Status status = Stream(&ends, 1, 3'000'000);
  CHECK(status.code() == Code::kUnavailable);
}

// Every byte of the header of an early and of a late message becomes another one.
void ChangeHeaders(bool encrypted) {
  for (const char* message : {"3", "7"})
    for (size_t offset = 0; offset < 32; ++offset)
      for (const char* byte : {"7f", "ff"}) {
        const std::string change =
            std::string(message) + ":" + std::to_string(offset) + ":" + byte;
        Ends ends = UnequalEnds({{"OFI_STUB_CHANGE", change}}, encrypted);
        const Status status = Stream(&ends, 0, 3'000'000);
        CHECK(status.code() == Code::kUnavailable);
        if (testing::failures > 0) return std::cerr << change << "\n", void();
      }
}

TEST(ChangedHeadersBreakALink) {
  if (OnStub(__func__)) ChangeHeaders(false);
}

TEST(ChangedHeadersBreakAnEncryptedLink) {
  if (OnStub(__func__)) ChangeHeaders(true);
}

TEST(MessagesOfAWrongLengthBreakALink) {
  if (!OnStub(__func__)) return;
  for (const char* length : {"2:0", "3:7", "3:31", "7:33", "7:1000", "7:9000000"}) {
    Ends ends = UnequalEnds({{"OFI_STUB_LENGTH", length}});
    const Status status = Stream(&ends, 0, 3'000'000);
    CHECK(status.code() == Code::kUnavailable);
    if (testing::failures > 0) return std::cerr << length << "\n", void();
  }
}

TEST(MemoryThatCannotBeLockedIsAnErrorThatSaysWhatToRaise) {
  if (!OnStub(__func__, {{"OFI_STUB_MEMLOCK", "200000"}})) return;
  Ends ends = UnequalEnds({});  // the small slots fit, the large ones do not
  const Status status = Stream(&ends, 0, 3'000'000);
  CHECK(status.code() == Code::kFailedPrecondition && Has(status, "ulimit -l"));
}

TEST(TooFewReceivesForAllSlotsAreAnError) {
  if (!OnStub(__func__)) return;
  Ends ends = UnequalEnds({{"OFI_STUB_RX", "9"}});  // none is left for large slots
  const Status status = Stream(&ends, 1, 3'000'000);
  CHECK(status.code() == Code::kFailedPrecondition);
  CHECK(Has(status, "needs more receives for its links than the 9 that stub"));
}

// A pair of a large job that exchanges short messages only has no large slots.
TEST(LargeSlotsAreRegisteredForLongMessagesOnly) {
  if (!OnStub(__func__)) return;
  std::string log = std::filesystem::temp_directory_path() / "ringjax-slots-XXXXXX";
  const Descriptor created(mkstemp(log.data()));
  CHECK(created.get() >= 0);
  const auto lines = [&log] {
    std::ifstream text(log);
    size_t bytes = 0, most = 0;
    for (std::string line; std::getline(text, line);)
      if (std::sscanf(line.c_str(), "{\"registered\": %zu}", &bytes) == 1)
        most = std::max(most, bytes);
    return most;
  };
  setenv("OFI_STUB_LOG", log.c_str(), 1);
  Ends ends = UnequalEnds({});
  CHECK(Stream(&ends, 0, 100).ok());
  CHECK(lines() > 0 && lines() < 100'000);
  CHECK(Stream(&ends, 0, 3'000'000).ok());
  CHECK(lines() > 1'000'000);
  unlink(log.c_str());
}

TEST(RanksTakeTheCardsOfAHostInTurn) {
  const Variables host = {{"OFI_STUB_PROVIDERS", "verbs;ofi_rxm,efa"},
                          {"OFI_STUB_CARDS", "card0,card1,ip0@10.0.0.1,ip1@10.0.0.2"}};
  if (!OnStub(__func__, host)) return;
  CHECK_EQ(Probe("efa", 1, "").domain, "card1");
  CHECK_EQ(Probe("efa", 4, "").domain, "card0");
  CHECK_EQ(Probe("efa:card1", 0, "").domain, "card1");
  CHECK_EQ(Probe("verbs", 2, "10.0.0.2").domain, "ip1");
  CHECK_EQ(Probe("verbs", 0, "").provider, "verbs;ofi_rxm");
  const FabricInfo missing = Probe("cxi", 0, "");
  CHECK(!missing.status.ok() && Has(missing.status, "verbs;ofi_rxm, efa"));
  CHECK_EQ(missing.providers.size(), 2u);
  CHECK(!Probe("efa:card7", 0, "").status.ok());
}

// Returns what a child of this process that runs `body` has written to stderr, if a
// signal ended it.
std::string Refusal(const std::function<void()>& body) {
  int fds[2];
  CHECK(pipe(fds) == 0);
  const pid_t child = fork();
  if (child == 0) {
    dup2(fds[1], STDERR_FILENO);
    body();
    _exit(0);
  }
  close(fds[1]);
  std::string text(1000, '\0');
  text.resize(static_cast<size_t>(
      std::max<ssize_t>(0, read(fds[0], text.data(), text.size()))));
  close(fds[0]);
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child && WIFSIGNALED(status));
  return text;
}

// Memory and an address with which an endpoint sends messages to itself.
struct Loop {
  alignas(4096) std::byte memory[4096] = {};
  FabricEndpoint::Operation one, two;
  std::shared_ptr<FabricEndpoint> endpoint;
  uint64_t address;
  ofi::Mr* registered;

  Loop() {
    FabricOptions options;
    options.library = RINGJAX_OFI_STUB;
    options.provider = "stub";
    endpoint = FabricEndpoint::Open(options).value();
    address = endpoint->Insert(endpoint->address()).value();
    registered = endpoint->Register(memory, sizeof memory).value();
  }
  void Send(ofi::Mr* with, size_t bytes = 100) {
    endpoint->Send(address, memory, bytes, with, 1, &one);
  }
  void Receive() { endpoint->Receive(memory + 2000, 100, registered, 1, &two); }
};

TEST(TheStubEndsAProcessThatBreaksARule) {
  if (!OnStub(__func__, {{"OFI_STUB_LAZY", "1"}})) return;
  const auto refuses = [](std::string_view sentence, auto body) {
    const std::string text = Refusal([&] {
      Loop loop;
      body(loop);
    });
    if (text.find(sentence) == text.npos)
      testing::Fail(__FILE__, __LINE__, std::string(sentence) + ": " + text);
  };
  refuses("no descriptor", [](Loop& loop) { loop.Send(nullptr); });
  refuses("outside", [](Loop& loop) { loop.Send(loop.registered, 5000); });
  refuses("changed", [](Loop& loop) {
    loop.Send(loop.registered);
    loop.memory[50] = std::byte{1};
    loop.endpoint->Poll();
  });
  refuses("two operations", [](Loop& loop) {
    loop.Receive();
    loop.Receive();
  });
  refuses("given up", [](Loop& loop) {
    loop.Receive();
    FabricEndpoint::Unregister(loop.registered);
  });
  refuses("no receive was posted", [](Loop& loop) {
    loop.Send(loop.registered);
    for (int i = 0; i < 10; ++i) loop.endpoint->Poll();
  });
  refuses("forked child", [](Loop& loop) {
    if (fork() == 0) loop.endpoint->Poll();
    wait(nullptr);
    std::abort();
  });
  refuses("two threads", [](Loop& loop) {
    const auto poll_forever = [&loop] {
      while (true) loop.endpoint->Poll();
    };
    std::thread other(poll_forever);
    poll_forever();
  });
  refuses("before what was opened", [](Loop& loop) { loop.endpoint.reset(); });
}

}  // namespace
}  // namespace ringjax
