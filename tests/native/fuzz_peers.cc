// Targets in which a peer is hostile. For all bytes that the peer sends on a link or
// writes into shared memory, the call of this rank ends with a Status.
//
// No call waits: the first sleep counts as an interrupt, so a call ends if bytes of the
// peer are missing. Valid inputs are recorded from honest ranks.
#include <atomic>
#include <cstring>
#include <memory>
#include <thread>
#include <utility>

#include "fuzz_targets.h"
#include "link_ends.h"
#include "local_world.h"
#include "transport/ring_link.h"

namespace ringjax::fuzz {
namespace {

constexpr size_t kRing = 1 << 15, kTile = 4096;
constexpr size_t kBeyondInline = 5000;  // floats: more than fit beside an agreement

bool Always() { return true; }

// -- the calls of this rank and of an honest peer

// The call of a number, for one of `size` ranks.
struct Work {
  Work(unsigned number, int rank, int size) {
    const auto ranks = static_cast<size_t>(size);
    const size_t n = number == 1 ? kBeyondInline : 12;
    data.assign(n, static_cast<float>(rank + 1));
    result.assign(number == 2 ? n * ranks : number == 5 ? n / ranks : n, 0);
    const auto all = static_cast<int64_t>(ranks);
    call.name = "x";
    call.tensors.push_back(Floats(&data, &result));
    switch (number) {
      case 0:
      case 1:
        call = AllreduceOf(&data);
        break;
      case 2:
        call = AllgatherOf(&data, &result, std::vector<int64_t>(ranks, 12));
        break;
      case 3:
        call.op = Collective::kBroadcast;
        call.root = 1;
        break;
      case 4:
        call.op = Collective::kAlltoall;
        call.rows.assign(2 * ranks, 12 / all);  // sent, then received
        break;
      case 5:
        call.op = Collective::kReducescatter;
        call.rows.assign(ranks, 12 / all);
        break;
      default:
        call.op = Collective::kBarrier;
        call.tensors.clear();
    }
  }
  std::vector<float> data, result;
  Call call;
};
constexpr unsigned kWorks = 8;  // 7: a round instead of a call

Status DoWork(Communicator* c, unsigned number) {
  if (number == 7) {
    std::vector<std::string> all;
    return c->rounds().Exchange(std::string(c->rank() == 0 ? 30 : 600, 'm'), &all);
  }
  Work work(number, c->rank(), c->size());
  return c->Run(work.call);
}

CommunicatorOptions OptionsOf(int rank, int size) {
  CommunicatorOptions o;
  o.topology = {rank, size, std::vector<int>(static_cast<size_t>(size), 0)};
  for (int r = 0; r < size; ++r) o.world_ranks.push_back(r);
  o.spin_seconds = 0;
  o.collective_timeout = 10;
  return o;
}

// A link that records the bytes that it sends.
class Tap final : public Link {
 public:
  Tap(std::unique_ptr<Link> link, std::string* record)
      : link_(std::move(link)), record_(record) {}
  std::string_view transport() const override { return "tap"; }
  Result<size_t> TryWrite(std::span<const iovec> pieces) override {
    const Result<size_t> n = link_->TryWrite(pieces);
    size_t left = n.ok() ? n.value() : 0;
    for (const iovec& piece : pieces) {
      const size_t part = std::min(left, piece.iov_len);
      record_->append(static_cast<const char*>(piece.iov_base), part);
      left -= part;
    }
    return n;
  }
  Result<size_t> TryRead(std::span<const iovec> p) override {
    return link_->TryRead(p);
  }
  Result<std::span<std::byte>> Reserve(size_t limit, size_t granularity) override {
    const auto reserved = link_->Reserve(limit, granularity);
    if (reserved.ok()) at_ = reserved.value().data();
    return reserved;
  }
  Status Commit(size_t bytes) override {
    record_->append(reinterpret_cast<const char*>(at_), bytes);
    return link_->Commit(bytes);
  }
  Result<std::span<const std::byte>> Peek(size_t limit, size_t granularity) override {
    return link_->Peek(limit, granularity);
  }
  void Consume(size_t bytes) override { link_->Consume(bytes); }
  Result<bool> Flush() override { return link_->Flush(); }
  bool Close() override { return link_->Close(); }
  CmaEndpoint* cma() override { return link_->cma(); }
  bool Arm(bool r, bool w, std::vector<pollfd>* fds) override {
    return link_->Arm(r, w, fds);
  }
  void Disarm() override { link_->Disarm(); }

 private:
  std::unique_ptr<Link> link_;
  std::string* record_;
  const std::byte* at_ = nullptr;
};

void Mean(const Status& status) {
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.message().c_str());
  ALWAYS(status.ok());
}

void DoTogether(const std::vector<std::shared_ptr<Communicator>>& ranks,
                unsigned number) {
  std::thread other([&] { Mean(DoWork(ranks[1].get(), number)); });
  Mean(DoWork(ranks[0].get(), number));
  other.join();
}

// Returns the bytes that rank 1 of two ranks sends to rank 0 in one call.
std::string Recorded(unsigned number) {
  std::string record;
  Ends ends = LocalEnds(kRing);
  std::vector<std::unique_ptr<Link>> links[2];
  links[0].resize(2);
  links[1].resize(2);
  links[0][1] = std::move(ends.links[0]);
  links[1][0] = std::make_unique<Tap>(std::move(ends.links[1]), &record);
  std::vector<std::shared_ptr<Communicator>> ranks;
  for (int r = 0; r < 2; ++r)
    ranks.push_back(std::make_shared<Communicator>(OptionsOf(r, 2), std::move(links[r]),
                                                   std::move(ends.bells[r])));
  DoTogether(ranks, number);
  return record;
}

// While the object exists, every sleep of this process is interrupted.
struct AlwaysInterrupted {
  AlwaysInterrupted() : before(interrupt_check.exchange(Always)) {}
  ~AlwaysInterrupted() { interrupt_check.store(before); }
  InterruptCheck before;
};

// -- frames: bytes on a link

void Write(Link* link, std::string_view bytes) {
  iovec piece{const_cast<char*>(bytes.data()), std::min(bytes.size(), kRing)};
  if (piece.iov_len > 0) ALWAYS(link->TryWrite({&piece, 1}).ok());
}

void Frames(std::string_view input) {
  Pieces pieces(input);
  const unsigned works = pieces.Byte(), kind = pieces.Byte();
  const int size = 2 + (kind >> 1) % 2;
  AlwaysInterrupted interrupted;
  auto bells = MakeDoorbells(size, kRing);
  std::vector<std::unique_ptr<Link>> mine(static_cast<size_t>(size)), theirs;
  for (int peer = 1; peer < size; ++peer) {
    const auto p = static_cast<size_t>(peer);
    if (kind & 1) {
      const auto [one, other] = UnixPair();
      mine[p] = std::move(MakeTcpLink({one}).value());
      theirs.push_back(std::move(MakeTcpLink({other}).value()));
    } else {
      mine[p] = std::move(MakeRingLink(bells[0].get(), peer).value());
      theirs.push_back(std::move(MakeRingLink(bells[p].get(), 0).value()));
    }
    Write(theirs.back().get(), peer == size - 1 ? pieces.rest() : pieces.Text());
  }
  bells[0]->Ring();
  Communicator c(OptionsOf(0, size), std::move(mine), std::move(bells[0]));
  for (int i = 0; i < 3 && !c.aborted(); ++i) {
    const Status status = DoWork(&c, (works + static_cast<unsigned>(i) * 3) % kWorks);
    ALWAYS(status.rank() >= -1 && status.rank() < size);
  }
}

std::vector<std::string> FramesSeeds() {
  std::vector<std::string> seeds;
  for (unsigned number = 0; number < kWorks; ++number) {
    if (number == 1) continue;  // longer than an input may be
    const std::string bytes = Recorded(number);
    seeds.push_back(std::string{static_cast<char>(number), 0} + bytes);
    seeds.push_back(std::string{static_cast<char>(number), 1} + bytes);
    seeds.push_back(std::string{static_cast<char>(number), 2} + Packed(bytes) + bytes);
  }
  return seeds;
}

// -- segment: shared memory that a peer writes at any time

// A peer that writes repeatedly where this rank writes, during the call of this rank.
// The race is intended, so ThreadSanitizer ignores the class.
class Scribbler {
 public:
  Scribbler(std::byte* to, std::string_view bytes) : to_(to), bytes_(bytes) {
    if (!bytes.empty()) thread_ = std::thread([this] { Run(); });
  }
  ~Scribbler() {
    stop_ = true;
    if (thread_.joinable()) thread_.join();
  }

 private:
  __attribute__((no_sanitize("thread"))) void Run() {
    while (!stop_)
      for (size_t i = 0; i < bytes_.size(); ++i)
        *static_cast<volatile char*>(reinterpret_cast<char*>(to_ + i)) = bytes_[i];
  }

  std::byte* to_;
  std::string_view bytes_;
  std::atomic<bool> stop_ = false;
  std::thread thread_;
};

void InSegment(std::string_view input) {
  Pieces pieces(input);
  const unsigned works = pieces.Byte();
  AlwaysInterrupted interrupted;
  Ends ends = LocalEnds(kRing, kTile);
  SharedSegment foul(ends.bells[1].get());
  for (uint64_t turn : {1, 2}) {
    const std::string_view slot = pieces.Text();
    std::memcpy(foul.InlineSlot(turn, 1), slot.data(),
                std::min(slot.size(), size_t{2048}));
  }
  for (int counter = 0; counter < SharedSegment::kCounters; ++counter) {
    const unsigned small = pieces.Byte();
    foul.Publish(static_cast<SharedSegment::Counter>(counter),
                 small < 255 ? small : pieces.Word());
  }
  const std::string_view area = pieces.Text();
  std::memcpy(foul.Area(1), area.data(), std::min(area.size(), foul.area_bytes()));
  const size_t room = SharedSegment::kHeaderBytes + foul.inline_bytes();
  const std::string_view over = pieces.Text().substr(0, room);
  const size_t place = pieces.Word() % (room - over.size() + 1);
  const Scribbler scribbler(foul.InlineSlot(1, 0) + place, over);
  Write(ends.links[1].get(), pieces.rest());
  ends.bells[0]->Ring();
  std::vector<std::unique_ptr<Link>> links(2);
  links[1] = std::move(ends.links[0]);
  auto segment = std::make_unique<SharedSegment>(ends.bells[0].get());
  Communicator c(OptionsOf(0, 2), std::move(links), std::move(ends.bells[0]),
                 std::move(segment));
  for (unsigned i = 0; i < 2 && !c.aborted(); ++i) {
    const Status status = DoWork(&c, (works + i) % kWorks);
    ALWAYS(status.rank() >= -1 && status.rank() < 2);
  }
}

// Returns the inline data and the counters of rank 1 after a call.
std::string Shown(unsigned number, std::string_view over) {
  Ends ends = LocalEnds(kRing, kTile);
  std::unique_ptr<SharedSegment> segments[2];
  for (int r = 0; r < 2; ++r)
    segments[r] = std::make_unique<SharedSegment>(ends.bells[r].get());
  const SharedSegment& segment = *segments[1];
  std::string record;
  std::vector<std::shared_ptr<Communicator>> ranks;
  for (int r = 0; r < 2; ++r) {
    std::vector<std::unique_ptr<Link>> links(2);
    links[static_cast<size_t>(1 - r)] =
        r == 1 ? std::make_unique<Tap>(std::move(ends.links[1]), &record)
               : std::move(ends.links[0]);
    ranks.push_back(std::make_shared<Communicator>(OptionsOf(r, 2), std::move(links),
                                                   std::move(ends.bells[r]),
                                                   std::move(segments[r])));
  }
  DoTogether(ranks, number);
  std::string bytes(1, static_cast<char>(number));
  for (uint64_t turn : {1, 2})
    bytes += Packed({reinterpret_cast<const char*>(segment.InlineSlot(turn, 1)), 700});
  for (int counter = 0; counter < SharedSegment::kCounters; ++counter)
    bytes += static_cast<char>(
        segment.Look(static_cast<SharedSegment::Counter>(counter), 1));
  const std::string own = Packed(over) + std::string(8, '\0');
  return bytes + Packed(std::string(64, '\1')) + own + record.substr(0, 4096);
}

std::vector<std::string> SegmentSeeds() {
  std::vector<std::string> seeds;
  for (unsigned number = 0; number < kWorks; ++number)
    for (const size_t over : {0, 40, 200})
      seeds.push_back(Shown(number, std::string(over, '\2')));
  return seeds;
}

// -- ring: positions and flags in shared memory

constexpr size_t kSmallRing = 64;

void Ring(std::string_view input) {
  static const Ends ends = ShmEnds(kSmallRing);
  static RingPair* const pair = SharedBy(ends);
  HostWords& peer = ends.bells[1]->words(1);
  std::memset(static_cast<void*>(pair), 0, sizeof *pair);
  std::memset(&peer, 0, sizeof peer);
  Pieces pieces(input);
  auto link = std::move(MakeRingLink(ends.bells[0].get(), 1).value());
  std::byte mine[256] = {};
  std::vector<pollfd> fds;
  for (int steps = 0; steps < 64 && !pieces.empty(); ++steps) {
    const unsigned what = pieces.Byte(), n = pieces.Byte();
    const size_t granularity = size_t{1} << (what >> 3) % 5;
    iovec piece{mine, n};
    switch (what % 8) {
      case 0:
        pair->positions[1].written = pieces.Word();
        break;
      case 1:
        pair->positions[0].read = pieces.Word();
        break;
      case 2:
        pair->positions[1].written += n;
        pair->positions[0].read += n / 2;
        break;
      case 3:
        if (auto moved = link->TryRead({&piece, 1}); moved.ok())
          ALWAYS(moved.value() <= n);
        break;
      case 4:
        if (auto moved = link->TryWrite({&piece, 1}); moved.ok())
          ALWAYS(moved.value() <= n);
        break;
      case 5: {
        auto seen = link->Peek(n & ~(granularity - 1), granularity);
        if (!seen.ok()) break;
        ALWAYS(seen.value().size() <= n && seen.value().size() % granularity == 0);
        std::copy(seen.value().begin(), seen.value().end(), mine);
        link->Consume(seen.value().size());
        break;
      }
      case 6: {
        auto room = link->Reserve(n & ~(granularity - 1), granularity);
        if (!room.ok()) break;
        ALWAYS(room.value().size() <= n && room.value().size() % granularity == 0);
        std::copy_n(mine, room.value().size(), room.value().data());
        if (!link->Commit(room.value().size()).ok()) break;
        break;
      }
      default:
        peer.closed = n % 4 == 0;
        peer.asleep = n % 3;
        peer.process = static_cast<int32_t>(n);
        pair->sides[1].wants = n;
        link->Arm(n & 1, n & 2, &fds);
        link->Disarm();
        fds.clear();
    }
  }
}

std::vector<std::string> RingSeeds() {
  return {std::string("\2\40\3\10\4\20\45\10\46\10\7\3", 12),
          std::string("\2\177\5\100\15\21\25\50\4\100\4\100\6\100", 14),
          std::string("\0\0\0\0\0\0\0\0\0\100\3\377\1\0\0\0\0\0\0\0\0\40\4\77", 22)};
}

}  // namespace

const std::vector<Target>& PeerTargets() {
  static const std::vector<Target> targets = {{"frames", Frames, FramesSeeds},
                                              {"segment", InSegment, SegmentSeeds},
                                              {"ring", Ring, RingSeeds}};
  return targets;
}

}  // namespace ringjax::fuzz
