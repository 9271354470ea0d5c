// Inline data: calls around the size of a slot, of uneven sizes, and calls whose data
// fit on some ranks only.
#include "engine/call/inline_data.h"

#include <cstring>
#include <functional>
#include <numeric>
#include <thread>

#include "check.h"
#include "link_ends.h"
#include "local_world.h"
#include "transport/shared_segment.h"

namespace ringjax {
namespace {

using Values32 = std::vector<float>;

uint64_t InlineFloats(int size) {
  const auto bells = MakeDoorbells(size, 4096, 4096);
  return SharedSegment(bells[0].get()).inline_bytes() / sizeof(float);
}

// Element i of the data that rank `from` sends to rank `to`.
float Value(int from, int to, size_t i) {
  return static_cast<float>(from * 1000 + to * 100) + static_cast<float>(i % 97);
}

// Runs an alltoall in which `from` sends rows[from][to] numbers to `to`.
void Exchange(World& world, const std::vector<std::vector<int64_t>>& rows) {
  world.Each([&](Communicator& c) {
    const auto me = static_cast<size_t>(c.rank()), size = rows.size();
    Values32 in, out, expected;
    Call call;
    call.op = Collective::kAlltoall;
    call.name = "a";
    call.rows = rows[me];
    for (size_t to = 0; to < size; ++to)
      for (int64_t i = 0; i < rows[me][to]; ++i)
        in.push_back(Value(c.rank(), static_cast<int>(to), static_cast<size_t>(i)));
    for (size_t from = 0; from < size; ++from) {
      call.rows.push_back(rows[from][me]);
      for (int64_t i = 0; i < rows[from][me]; ++i)
        expected.push_back(
            Value(static_cast<int>(from), c.rank(), static_cast<size_t>(i)));
    }
    out.resize(expected.size());
    call.tensors.push_back(Floats(&in, &out));
    CHECK(c.Run(call).ok());
    CHECK(out == expected);
  });
}

uint64_t InlineCalls(const World& world, const std::string& op) {
  const auto all = world.ranks[0]->log().stats();
  const auto& algorithms = all.at(op).algorithms;
  const auto found = algorithms.find(kShared);
  return found == algorithms.end() ? 0 : static_cast<uint64_t>(found->second);
}

TEST(AlltoallsOfAllShapesAreInlineIfTheyFitOnAllRanks) {
  for (const int size : {2, 3, 5}) {
    World world(std::vector<int>(static_cast<size_t>(size), 0));
    const auto n = static_cast<size_t>(size);
    const auto most = static_cast<int64_t>(InlineFloats(size));
    std::vector<std::vector<int64_t>> rows(n, std::vector<int64_t>(n, 3));
    Exchange(world, rows);
    for (size_t r = 0; r < n; ++r)
      for (size_t to = 0; to < n; ++to) rows[r][to] = static_cast<int64_t>(r + 2 * to);
    Exchange(world, rows);
    CHECK_EQ(InlineCalls(world, "alltoall"), 2u);
    rows[n - 1][0] = most;  // with the table of rows, too much for one rank
    for (int i = 0; i < 3; ++i) Exchange(world, rows);
    CHECK_EQ(InlineCalls(world, "alltoall"), 2u);
    for (auto& row : rows) row.assign(n, 0);  // no rank sends anything
    Exchange(world, rows);
    rows[0][n - 1] = 1;
    Exchange(world, rows);
    CHECK_EQ(InlineCalls(world, "alltoall"), 4u);
  }
}

TEST(CallsAtTheInlineLimitAreRight) {
  for (const int size : {2, 3, 5, 20}) {
    World world(std::vector<int>(static_cast<size_t>(size), 0));
    const uint64_t most = InlineFloats(size);
    for (const uint64_t n : {uint64_t{1}, most - 1, most, most + 1}) {
      world.Each([&](Communicator& c) {
        Values32 x(n, static_cast<float>(1 + c.rank()));
        Call broadcast = AllreduceOf(&x);
        broadcast.op = Collective::kBroadcast;
        broadcast.root = size - 1;
        CHECK(c.Run(broadcast).ok());
        CHECK(x == Values32(n, static_cast<float>(size)));
        Values32 all(n + static_cast<uint64_t>(size) - 1), expected(x);
        expected.insert(expected.begin(), static_cast<size_t>(size) - 1, 0);
        std::vector<int64_t> rows(static_cast<size_t>(size), 1);
        rows.back() = static_cast<int64_t>(n);
        Values32 mine(c.rank() == size - 1 ? n : 1, static_cast<float>(c.rank()));
        CHECK(c.Run(AllgatherOf(&mine, &all, rows)).ok());
        std::iota(expected.begin(), expected.begin() + size - 1, 0.0f);
        std::fill(expected.begin() + size - 1, expected.end(),
                  static_cast<float>(size - 1));
        CHECK(all == expected);
      });
    }
  }
}

TEST(SplitsThatDoNotMatchAreDetectedInInlineData) {
  World world({0, 0, 0});
  for (int i = 0; i < 3; ++i) {
    world.Each([](Communicator& c) {
      Values32 in(6, 1), out(6);
      Call call;
      call.op = Collective::kAlltoall;
      call.rows = {2, 2, 2, 2, 2, 2};
      if (c.rank() == 1) call.rows = {2, 2, 2, 3, 2, 1};
      call.tensors.push_back(Floats(&in, &out));
      const Status status = c.Run(call);
      CHECK(status.code() == Code::kMismatch);
      CHECK(!c.aborted());
    });
    Exchange(world, {{1, 2, 3}, {4, 5, 6}, {7, 8, 9}});
  }
}

// Runs one rank of a shared segment beside a hostile peer, which writes while this rank
// waits for inline data. `write` receives the slots of both ranks, behind the headers.
Status RunBesideHostilePeer(int rank, int64_t rows, Values32* in, Values32* out,
                            const std::function<void(std::byte*, std::byte*)>& write) {
  Ends ends = LocalEnds(1 << 15, 4096);
  SharedSegment hostile(ends.bells[1 - rank].get());
  auto segment = std::make_unique<SharedSegment>(ends.bells[rank].get());
  CommunicatorOptions o;
  o.topology = {rank, 2, {0, 0}};
  o.world_ranks = {0, 1};
  std::vector<std::unique_ptr<Link>> links(2);
  links[1 - rank] = std::move(ends.links[rank]);
  Communicator victim(o, std::move(links), std::move(ends.bells[rank]),
                      std::move(segment));
  Call call;
  call.op = Collective::kAlltoall;
  call.name = "x";
  call.rows = {rows, rows, rows, rows};
  call.tensors.push_back(Floats(in, out));
  Status status;
  std::thread thread([&] { status = victim.Run(call); });
  while (hostile.Look(SharedSegment::kAgreed, rank) < 1) std::this_thread::yield();
  std::byte* slots[2] = {hostile.InlineSlot(1, 0), hostile.InlineSlot(1, 1)};
  std::memcpy(slots[1 - rank], slots[rank], SharedSegment::kHeaderBytes);
  write(slots[0] + SharedSegment::kHeaderBytes, slots[1] + SharedSegment::kHeaderBytes);
  hostile.Publish(SharedSegment::kAgreed, 1);
  thread.join();
  return status;
}

// A rank does not read its own byte counts back from the shared segment, where a peer
// may write.
TEST(APeerThatWritesIntoTheInlineSlotOfAnotherRankChangesNoBounds) {
  for (const int64_t rows : {12, 0}) {
    const auto count = static_cast<size_t>(2 * rows);
    Values32 in(count, 1), out(count, -1);
    const uint64_t part = static_cast<uint64_t>(rows) * sizeof(float), most = 60000;
    const Status status = RunBesideHostilePeer(
        0, rows, &in, &out, [&](std::byte* own, std::byte* hostile) {
          const uint64_t expects[5] = {1, part, part, part, most};
          const uint64_t sends[5] = {1, most, part, part, part};
          std::memcpy(own, expects, sizeof expects);
          std::memcpy(hostile, sends, sizeof sends);
        });
    CHECK(status.code() == Code::kMismatch);
    CHECK(out == Values32(count, -1));
  }
}

// This rank does not read the parts for lower ranks, so a peer may claim any length for
// them.
TEST(PartsBeyondAnInlineSlotAreDamage) {
  Values32 in(24, 1), out(24, -1);
  const Status status =
      RunBesideHostilePeer(1, 12, &in, &out, [](std::byte* hostile, std::byte*) {
        const uint64_t table[5] = {1, 1 << 20, 48, 1 << 20, 48};
        std::memcpy(hostile, table, sizeof table);
      });
  CHECK(status.code() == Code::kUnavailable);
  CHECK(status.message().find("impossible splits") != std::string::npos);
}

// Each rank reduces the inline data of all ranks, from memory of another alignment.
TEST(InlineSumsHaveTheSameBitsOnAllRanksAlsoIfTheyAreNans) {
  World world({0, 0});
  constexpr size_t n = 37;
  std::vector<uint32_t> bits[2];
  world.Each([&](Communicator& c) {
    Values32 memory(4 * n);
    float* tensors[2] = {memory.data(), memory.data() + n + (c.rank() == 0 ? 0 : 16)};
    const uint32_t nan = c.rank() == 0 ? 0xffc00001 : 0x7fc00002;
    Call call;
    call.name = "x";
    for (float* tensor : tensors) {
      for (size_t i = 0; i < n; ++i) std::memcpy(tensor + i, &nan, sizeof nan);
      call.tensors.push_back({DType::kF32, {n}, tensor, tensor, n * sizeof(float)});
    }
    CHECK(c.Run(call).ok());
    std::vector<uint32_t>& out = bits[c.rank()];
    out.resize(2 * n);
    for (size_t k = 0; k < 2; ++k)
      std::memcpy(out.data() + k * n, tensors[k], n * sizeof(float));
  });
  CHECK_EQ(InlineCalls(world, "allreduce"), 1u);
  CHECK(bits[0] == bits[1]);
}

}  // namespace
}  // namespace ringjax
