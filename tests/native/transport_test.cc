// Links between two threads. Every transport must carry the same streams, wake a
// sleeping end, and report a peer that is gone. link_refusal_test.cc tests what links
// refuse.
#include <poll.h>

#include <bit>
#include <chrono>
#include <cstring>
#include <functional>
#include <random>
#include <thread>

#include "check.h"
#include "link_ends.h"
#include "transport/link.h"

namespace ringjax {
namespace {

const std::pair<const char*, MakeEnds> kTransports[] = {
    {"local 64", [] { return LocalEnds(64); }},
    {"local 4096", [] { return LocalEnds(4096); }},
    {"shm 4096", [] { return ShmEnds(4096); }},
    {"shm 256 KiB", [] { return ShmEnds(256 << 10); }},
    {"tcp x1", [] { return SocketEnds(1, Loopback); }},
    {"tcp x3", [] { return SocketEnds(3, Loopback); }},
    {"unix x1", [] { return SocketEnds(1, UnixPair); }},
    {"unix x3", [] { return SocketEnds(3, UnixPair); }},
    {"tls x1", [] { return SocketEnds(1, Loopback, true); }},
    {"tls x3", [] { return SocketEnds(3, Loopback, true); }},
};
// Links over libfabric. Small slots make messages cross them in all places.
const std::tuple<const char*, size_t, int, bool> kFabrics[] = {
    {"tcp", 528, 4, false},
    {"tcp", 64 << 10, 3, false},
    {"tcp", 256 << 10, 8, true},
    {"tcp;ofi_rxm", 4 << 10, 16, false},
    {"tcp;ofi_rxm", 16 << 10, 1, true},
};

// Byte number `at` of the stream that `side` writes.
std::byte Content(int side, uint64_t at) {
  uint64_t x = at * 0x9e3779b97f4a7c15u + static_cast<uint64_t>(side);
  return static_cast<std::byte>(x >> 56 ^ x >> 31);
}

struct Message {
  size_t bytes, granularity;
};

// Both ends draw the same messages from the same seed: odd sizes before wide elements.
std::vector<Message> Messages(int side, size_t count, size_t largest, bool uniform) {
  std::mt19937 random(17 + static_cast<unsigned>(side));
  std::vector<Message> all;
  for (size_t i = 0; i < count; ++i) {
    const size_t granularity = uniform ? 8 : size_t{1} << random() % 5;
    const size_t range = random() % 4 ? 64 : largest / granularity;
    all.push_back({(random() % range + 1) * granularity, granularity});
  }
  return all;
}

// Sleeps until the link can move bytes; if it `polls`, in poll(2) even if the link has
// no descriptor. Returns false after 30 seconds, if a wake-up was lost.
bool Sleep(Link* link, Doorbell* bell, bool reads, bool writes, bool polls = false) {
  constexpr std::chrono::milliseconds kLost(30'000);
  std::vector<pollfd> fds;
  if (polls) fds.push_back({-1, POLLIN, 0});
  const auto start = Clock::now();
  if (!link->Arm(reads, writes, &fds)) bell->Sleep(&fds, kLost.count());
  link->Disarm();
  return Clock::now() - start < kLost;
}

// One end of a duplex exchange of messages, moved in all the ways there are.
class Exchange {
 public:
  Exchange(Link* link, Doorbell* bell, int side, size_t count, size_t largest,
           bool uniform)
      : link_(link),
        bell_(bell),
        side_(side),
        uniform_(uniform),
        out_(Messages(side, count, largest, uniform)),
        in_(Messages(1 - side, count, largest, uniform)),
        random_(99 + static_cast<unsigned>(side)) {}

  void Run() {
    while (true) {
      const bool writes = sent_ < out_.size(), reads = received_ < in_.size();
      bool flushed = true;
      if (!writes) {
        Result<bool> done = link_->Flush();
        CHECK(done.ok());
        flushed = done.ok() && done.value();
      }
      if (!writes && !reads && flushed) return;
      const bool moved = (writes && Send()) | (reads && Receive());
      if (testing::failures > 0) return;
      if (moved) continue;
      if (!Sleep(link_, bell_, reads, writes || !flushed))
        testing::Fail(__FILE__, __LINE__, "nobody woke a sleeping end");
    }
  }

 private:
  bool Send() {
    const Message& m = out_[sent_];
    const size_t left = Portion(m.bytes - out_done_);
    size_t n = 0;
    if (out_done_ % m.granularity == 0 && random_() % 2) {
      auto room = link_->Reserve(left, m.granularity);
      CHECK(room.ok());
      if (!room.ok()) return false;
      CheckRegion(room.value().data(), room.value().size(), left, m.granularity);
      n = room.value().size();
      n = Used(n, m.granularity);
      for (size_t i = 0; i < n; ++i) room.value()[i] = Content(side_, out_total_ + i);
      CHECK(link_->Commit(n).ok());
    } else {
      buffer_.resize(left);
      for (size_t i = 0; i < left; ++i) buffer_[i] = Content(side_, out_total_ + i);
      auto written = link_->TryWrite(Split());
      CHECK(written.ok());
      if (!written.ok()) return false;
      n = written.value();
    }
    most_ = std::max(most_, n);
    Advance(n, m.bytes, &out_done_, &out_total_, &sent_);
    return n > 0;
  }

  bool Receive() {
    const Message& m = in_[received_];
    const size_t left = Portion(m.bytes - in_done_);
    size_t n = 0;
    if (in_done_ % m.granularity == 0 && random_() % 2) {
      auto bytes = link_->Peek(left, m.granularity);
      CHECK(bytes.ok());
      if (!bytes.ok()) return false;
      CheckRegion(bytes.value().data(), bytes.value().size(), left, m.granularity);
      n = bytes.value().size();
      n = Used(n, m.granularity);
      for (size_t i = 0; i < n; ++i)
        CHECK(bytes.value()[i] == Content(1 - side_, in_total_ + i));
      link_->Consume(n);
    } else {
      buffer_.assign(left, std::byte{0});
      auto got = link_->TryRead(Split());
      CHECK(got.ok());
      if (!got.ok()) return false;
      n = got.value();
      for (size_t i = 0; i < n; ++i)
        CHECK(buffer_[i] == Content(1 - side_, in_total_ + i));
    }
    Advance(n, m.bytes, &in_done_, &in_total_, &received_);
    return n > 0;
  }

  // Returns how much of a message to move at once: 64 bytes to 256 KiB, but not much
  // more than a small ring holds, because all of it is filled or cleared before.
  size_t Portion(size_t left) {
    const size_t likely = std::bit_floor(64 + 8 * most_);
    return std::min({left, size_t{64} << random_() % 13, likely});
  }

  // Returns how much of a region to use, which sometimes is less than offered.
  size_t Used(size_t offered, size_t granularity) {
    if (offered == 0 || random_() % 4 != 0) return offered;
    return random_() % (offered / granularity + 1) * granularity;
  }

  // Returns buffer_ as a few pieces, some of which are empty.
  std::span<const iovec> Split() {
    pieces_.clear();
    for (size_t at = 0; at < buffer_.size();) {
      const size_t n = std::min<size_t>(random_() % 3 ? random_() % 40 : buffer_.size(),
                                        buffer_.size() - at);
      pieces_.push_back({buffer_.data() + at, n});
      at += n;
    }
    return pieces_;
  }

  void CheckRegion(const std::byte* data, size_t bytes, size_t limit,
                   size_t granularity) const {
    CHECK(bytes <= limit && bytes % granularity == 0);
    if (uniform_) CHECK_EQ(reinterpret_cast<uintptr_t>(data) % granularity, 0u);
  }

  static void Advance(size_t n, size_t bytes, size_t* done, uint64_t* total,
                      size_t* index) {
    *done += n;
    *total += n;
    if (*done < bytes) return;
    *done = 0;
    ++*index;
  }

  Link* link_;
  Doorbell* bell_;
  int side_;
  bool uniform_;
  std::vector<Message> out_, in_;
  std::mt19937 random_;
  std::vector<std::byte> buffer_;
  std::vector<iovec> pieces_;
  size_t most_ = 0;  // bytes moved in one call
  size_t sent_ = 0, received_ = 0, out_done_ = 0, in_done_ = 0;
  uint64_t out_total_ = 0, in_total_ = 0;
};

void ExchangeOn(const MakeEnds& make, size_t count, size_t largest, bool uniform) {
  Ends ends = make();
  std::thread threads[2];
  for (int side = 0; side < 2; ++side)
    threads[side] = std::thread([&ends, side, count, largest, uniform] {
      Exchange(ends.links[side].get(), ends.bells[side].get(), side, count, largest,
               uniform)
          .Run();
    });
  for (auto& thread : threads) thread.join();
}

// RINGJAX_TEST_PROVIDER names a provider of libfabric that replaces all transports
// (ofi_stub_test.cc).
void OnEveryTransport(const std::function<void(const MakeEnds&)>& body) {
  const char* const only = std::getenv("RINGJAX_TEST_PROVIDER");
  for (const auto& [name, make] : kTransports) {
    if (only != nullptr) break;
    const int before = testing::failures;
    body(make);
    if (testing::failures != before) std::cerr << "  on " << name << "\n";
  }
  for (const auto& [usual, slot, slots, sealed] : kFabrics) {
    const char* const provider = only != nullptr ? only : usual;
    FabricOptions options;
    options.library = FabricLibrary();
    options.provider = provider;
    if (const FabricInfo found = ProbeFabric(options); !found.status.ok()) {
      std::cerr << "  skipped: " << found.status.message() << "\n";
      continue;
    }
    const int before = testing::failures;
    body([&, slot = slot, slots = slots, sealed = sealed] {
      return FabricEnds(provider, slot, slots, sealed);
    });
    if (testing::failures != before)
      std::cerr << "  on " << provider << ", " << slots << " slots of " << slot << "\n";
  }
}

TEST(StreamsOfOddMessagesArriveUnchanged) {
  OnEveryTransport([](const MakeEnds& make) { ExchangeOn(make, 1500, 3000, false); });
}

TEST(StreamsOfLongMessagesArriveUnchanged) {
  OnEveryTransport([](const MakeEnds& make) { ExchangeOn(make, 16, 700000, false); });
}

TEST(RegionsOfEvenMessagesAreAligned) {
  OnEveryTransport([](const MakeEnds& make) { ExchangeOn(make, 500, 9000, true); });
}

// Writes or reads `bytes` bytes. Spins for a random time and then sleeps.
bool MoveAll(Link* link, Doorbell* bell, bool writes, std::byte* data, size_t bytes,
             std::mt19937* random) {
  unsigned left = (*random)() % 40;
  for (size_t done = 0; done < bytes;) {
    const iovec piece{data + done, bytes - done};
    const auto n = writes ? link->TryWrite({&piece, 1}) : link->TryRead({&piece, 1});
    if (!n.ok()) return false;
    done += n.value();
    if (n.value() > 0) continue;
    if (left-- > 0) continue;
    left = (*random)() % 40;
    if (!Sleep(link, bell, !writes, writes, (*random)() % 2)) return false;
  }
  return true;
}

// Sends what the link has only staged, before its thread stops to call it.
bool FlushAll(Link* link, Doorbell* bell) {
  for (;;) {
    const Result<bool> all = link->Flush();
    if (!all.ok() || all.value()) return all.ok();
    if (!Sleep(link, bell, false, true)) return false;
  }
}

void PingPong(const MakeEnds& make, int rounds) {
  Ends ends = make();
  const auto play = [&ends, rounds](int side) {
    std::mt19937 random(static_cast<unsigned>(side));
    std::byte data[64];
    for (int i = 0; i < rounds && testing::failures == 0; ++i) {
      // The sizes wrap the smallest ring around again and again.
      const size_t bytes = static_cast<size_t>(i * 7 % 41 + 1);
      std::memset(data, i & 0xff, bytes);
      for (bool writes : {side == 0, side == 1})
        CHECK(MoveAll(ends.links[side].get(), ends.bells[side].get(), writes, data,
                      bytes, &random));
      CHECK(data[0] == static_cast<std::byte>(i));
    }
    CHECK(FlushAll(ends.links[side].get(), ends.bells[side].get()));
  };
  std::thread other(play, 1);
  play(0);
  other.join();
}

// RINGJAX_TEST_ROUNDS raises the number for a long search.
int Rounds(int usual) {
  const char* text = std::getenv("RINGJAX_TEST_ROUNDS");
  return text == nullptr ? usual : std::atoi(text);
}

TEST(NoWakeUpIsLost) {
  OnEveryTransport([](const MakeEnds& make) { PingPong(make, Rounds(20000)); });
}

// The writer overruns a small ring, so that both ends sleep: for bytes and for room.
TEST(NoWakeUpIsLostWhenTheRingIsFull) {
  OnEveryTransport([](const MakeEnds& make) {
    Ends ends = make();
    const int rounds = Rounds(4000);
    const auto stream = [&ends, rounds](int side) {
      std::mt19937 random(static_cast<unsigned>(side));
      std::byte data[150] = {};
      for (int i = 0; i < rounds && testing::failures == 0; ++i)
        CHECK(MoveAll(ends.links[side].get(), ends.bells[side].get(), side == 0, data,
                      sizeof(data), &random));
      CHECK(FlushAll(ends.links[side].get(), ends.bells[side].get()));
    };
    std::thread other(stream, 1);
    stream(0);
    other.join();
  });
}

// The pieces are more than one system call accepts, and short, so that TCP reads ahead.
TEST(VeryManyPiecesAreReadAndWritten) {
  OnEveryTransport([](const MakeEnds& make) {
    Ends ends = make();
    std::byte data[1500], got[1500] = {};
    std::vector<iovec> from, to;
    for (size_t i = 0; i < std::size(data); ++i) {
      data[i] = Content(0, i);
      from.push_back({data + i, 1});
      to.push_back({got + i, 1});
    }
    size_t sent = 0, received = 0;
    for (int i = 0; received < std::size(got) && i < 1000; ++i) {
      const auto wrote = ends.links[0]->TryWrite(std::span(from).subspan(sent));
      const auto read = ends.links[1]->TryRead(std::span(to).subspan(received));
      CHECK(wrote.ok() && read.ok() && ends.links[0]->Flush().ok());
      if (!wrote.ok() || !read.ok()) return;
      sent += wrote.value();
      received += read.value();
    }
    CHECK(std::memcmp(got, data, sizeof data) == 0);
  });
}

// A fragment of an element must not keep its reader awake.
TEST(AFragmentOfAnElementWakesNoReader) {
  OnEveryTransport([](const MakeEnds& make) {
    Ends ends = make();
    std::byte data[8] = {};
    const iovec five{data, 5}, three{data, 3};
    CHECK_EQ(ends.links[0]->TryWrite({&five, 1}).value(), 5u);
    CHECK(FlushAll(ends.links[0].get(), ends.bells[0].get()));
    std::vector<pollfd> fds;
    const auto peek = [&] { return ends.links[1]->Peek(8, 8).value().size(); };
    CHECK_EQ(peek(), 0u);
    const std::string_view transport = ends.links[1]->transport();
    const bool in_memory = transport == "local" || transport == "shm";
    for (int i = 0; i < 100 && !in_memory; ++i) CHECK_EQ(peek(), 0u);
    CHECK(!ends.links[1]->Arm(true, false, &fds));
    ends.links[1]->Disarm();
    CHECK_EQ(ends.links[0]->TryWrite({&three, 1}).value(), 3u);
    CHECK(FlushAll(ends.links[0].get(), ends.bells[0].get()));
    CHECK(Sleep(ends.links[1].get(), ends.bells[1].get(), true, false));
    CHECK_EQ(peek(), 8u);
  });
}

// Repeats an attempt until the link fails, and returns the status.
template <typename CallAttempt>
Status Until(Link* link, Doorbell* bell, bool reads, CallAttempt attempt) {
  const auto start = Clock::now();
  while (Clock::now() - start < std::chrono::seconds(30)) {
    auto result = attempt();
    if (!result.ok()) return result.status();
    CHECK(Sleep(link, bell, reads, !reads));
  }
  return OkStatus();
}

TEST(AClosedEndIsUnavailableAfterItsLastBytes) {
  OnEveryTransport([](const MakeEnds& make) {
    Ends ends = make();
    std::byte data[10];
    for (size_t i = 0; i < 10; ++i) data[i] = Content(0, i);
    const iovec piece{data, 10};
    CHECK_EQ(ends.links[0]->TryWrite({&piece, 1}).value(), 10u);
    // This end sleeps until more bytes arrive when the other end closes.
    Link* link = ends.links[1].get();
    Doorbell* bell = ends.bells[1].get();
    std::thread closer([&ends] {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      ends.links[0].reset();
      ends.bells[0].reset();
    });
    std::mt19937 random(1);
    std::byte got[10];
    CHECK(MoveAll(link, bell, false, got, 10, &random));
    CHECK(std::memcmp(got, data, 10) == 0);
    const iovec more{got, 10};
    const Status read =
        Until(link, bell, true, [&] { return link->TryRead({&more, 1}); });
    CHECK(read.code() == Code::kUnavailable);
    CHECK(read.message().starts_with("has closed the "));  // after "rank 1 "
    const Status peek = Until(link, bell, true, [&] { return link->Peek(8, 8); });
    CHECK(peek.code() == Code::kUnavailable);
    const Status written =
        Until(link, bell, false, [&] { return link->TryWrite({&more, 1}); });
    CHECK(written.code() == Code::kUnavailable);
    CHECK(link->Reserve(8, 8).status().code() == Code::kUnavailable);
    closer.join();
  });
}

}  // namespace
}  // namespace ringjax
