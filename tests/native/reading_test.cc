// Ranks that read each other's memory: every collective that can be run so, against
// what must come out; and peers whose memory may not be read, or that post nonsense.
#include "engine/call/reading.h"

#include <unistd.h>

#include <cstring>
#include <numeric>
#include <thread>

#include "check.h"
#include "local_world.h"

namespace ringjax {
namespace {

constexpr char kForced[] = "broadcast:reading,allgather:reading,alltoall:reading";

uint64_t CallsOf(Communicator& c, const std::string& op, std::string_view algorithm) {
  const auto stats = c.stats();
  const auto found = stats.find(op);
  if (found == stats.end()) return 0;
  const auto calls = found->second.algorithms.find(algorithm);
  return calls == found->second.algorithms.end() ? 0 : calls->second;
}

float Value(int rank, size_t i) { return static_cast<float>(1000 * rank + i % 999); }

void CheckBroadcast(Communicator& c, const std::vector<size_t>& counts, bool in_place) {
  const int root = c.size() - 1;
  std::vector<std::vector<float>> in, out;
  for (const size_t n : counts) {
    in.emplace_back(n);
    for (size_t i = 0; i < n; ++i) in.back()[i] = Value(c.rank(), i);
    out.emplace_back(n, -1.0f);
  }
  Call call;
  call.op = Collective::kBroadcast;
  call.name = "b";
  call.root = root;
  for (size_t k = 0; k < counts.size(); ++k)
    call.tensors.push_back(Floats(&in[k], in_place ? &in[k] : &out[k]));
  CHECK(c.Run(call).ok());
  for (size_t k = 0; k < counts.size(); ++k)
    for (size_t i = 0; i < counts[k]; ++i)
      if (const float got = in_place ? in[k][i] : out[k][i]; got != Value(root, i))
        return CHECK_EQ(got, Value(root, i));
}

TEST(BroadcastByReading) {
  const std::vector<std::vector<size_t>> cases = {
      {1}, {0, 3, 1000}, {100003}, std::vector<size_t>(150, 37), {3000000}};
  for (const int size : {2, 3, 5}) {
    World world(std::vector<int>(static_cast<size_t>(size), 0), kForced);
    world.Each([&](Communicator& c) {
      for (const auto& counts : cases)
        for (const bool in_place : {false, true}) CheckBroadcast(c, counts, in_place);
      CHECK_EQ(CallsOf(c, "broadcast", kReading), 2 * cases.size());
      // More pieces than there is room to post: by messages, and the next one reads.
      CheckBroadcast(c, std::vector<size_t>(2000, 3), false);
      CheckBroadcast(c, {1000}, false);
      CHECK_EQ(CallsOf(c, "broadcast", kReading), 2 * cases.size() + 2);
    });
  }
}

TEST(AllgatherAndAlltoallByReading) {
  for (const int size : {2, 3, 5}) {
    World world(std::vector<int>(static_cast<size_t>(size), 0), kForced);
    world.Each([&](Communicator& c) {
      for (const int64_t unit : {0, 1, 777, 300000}) {
        // Rank r gives r times the unit; to rank t it sends (r + t) times.
        std::vector<int64_t> rows;
        std::vector<float> in, out, expected;
        for (int r = 0; r < size; ++r) rows.push_back(r * unit);
        in.resize(static_cast<size_t>(rows[static_cast<size_t>(c.rank())]));
        for (size_t i = 0; i < in.size(); ++i) in[i] = Value(c.rank(), i);
        for (int r = 0; r < size; ++r)
          for (int64_t i = 0; i < r * unit; ++i)
            expected.push_back(Value(r, static_cast<size_t>(i)));
        out.resize(expected.size());
        CHECK(c.Run(AllgatherOf(&in, &out, rows)).ok());
        CHECK(out == expected);

        Call call;
        call.op = Collective::kAlltoall;
        call.name = "a";
        in.clear(), expected.clear();
        for (int t = 0; t < size; ++t) call.rows.push_back((c.rank() + t) * unit);
        for (int s = 0; s < size; ++s) call.rows.push_back((s + c.rank()) * unit);
        for (int t = 0; t < size; ++t)
          in.insert(in.end(), static_cast<size_t>((c.rank() + t) * unit),
                    Value(c.rank(), static_cast<size_t>(t)));
        for (int s = 0; s < size; ++s)
          expected.insert(expected.end(), static_cast<size_t>((s + c.rank()) * unit),
                          Value(s, static_cast<size_t>(c.rank())));
        out.assign(expected.size(), -1);
        call.tensors.push_back(Floats(&in, &out));
        CHECK(c.Run(call).ok());
        CHECK(out == expected);
      }
    });
  }
}

TEST(ReadingTakesTurnsWithTiles) {
  World world({0, 0, 0}, "broadcast:reading");
  world.Each([](Communicator& c) {
    for (int i = 0; i < 20; ++i) {
      std::vector<float> x(static_cast<size_t>(1 + 5000 * i), 1);
      CHECK(c.Run(AllreduceOf(&x)).ok());
      CHECK(x == std::vector<float>(x.size(), 3));
      CheckBroadcast(c, {x.size()}, true);
    }
  });
}

// Rank 0 of two, and what rank 1 posts, played by the test.
struct Played {
  // pid, where the proof is, the proof, pieces, failed; parts for both; a piece.
  struct Post {
    uint64_t pid, proof_at, proof, pieces, failed;
    uint64_t parts[4];
    uint64_t address, bytes;
  };

  Played() {
    bell = MakeBell();
    boards = MakeLocalBoards(4096, {bell.get(), nullptr});
    lane.board = std::move(boards[0]);
    lane.timeout = 20;
    proof = 77;
    for (size_t i = 0; i < theirs.size(); ++i) theirs[i] = static_cast<float>(i);
    post = {static_cast<uint64_t>(getpid()),
            reinterpret_cast<uintptr_t>(&proof),
            77,
            1,
            0,
            {0, theirs.size() * 4, 0, 0},
            reinterpret_cast<uintptr_t>(theirs.data()),
            theirs.size() * 4};
  }

  // Rank 0 receives all that rank 1 has.
  Status Run(bool* could) {
    std::thread peer([&] {
      Board& board = *boards[1];
      std::memcpy(board.Area(1), &post, sizeof post);
      board.Publish(Board::kPosted, 1);
      if (gives_up) board.Stop();
      board.Publish(Board::kSummed, 1);
    });
    std::vector<float> unused;
    Spans in, out;
    out.Add(ours.data(), ours.size() * 4);
    const Memory memory{&in, &out, {}};
    Waiter waiter(bell.get(), &aborted, 0, false);
    const Problem problem{Collective::kBroadcast, 1, {ours.size() * 4}};
    const Status status = MoveByReading(problem, memory, lane, &waiter, could);
    peer.join();
    return status;
  }

  std::unique_ptr<Doorbell> bell;
  std::vector<std::unique_ptr<Board>> boards;
  Lane lane;
  std::atomic<bool> aborted{false};
  uint64_t proof;
  bool gives_up = false;
  std::vector<float> theirs = std::vector<float>(1000), ours = std::vector<float>(1000);
  Post post;
};

TEST(MemoryThatMayNotBeReadIsFoundOut) {
  const auto tried = [](auto change) {
    Played played;
    change(played);
    bool could = true;
    CHECK(played.Run(&could).ok());
    CHECK_EQ(played.lane.board->mine(Board::kFetched), 1u);
    CHECK_EQ(played.boards[1]->Stopped(), -1);
    CHECK(!could || played.ours == played.theirs);
    return could;
  };
  CHECK(tried([](Played&) {}));
  CHECK(!tried([](Played& p) { p.proof = 78; }));  // another process
  CHECK(!tried([](Played& p) { p.post.proof_at = 8; }));
  CHECK(!tried([](Played& p) { p.post.pid = 1u << 30; }));
  CHECK(!tried([](Played& p) { p.post.address = 8; }));
  CHECK(!tried([](Played& p) { p.post.failed = 1; }));  // it could not read ours
  CHECK(!tried([](Played& p) { p.post.pieces = 0; }));
}

TEST(PostsThatCannotBeAreDamage) {
  const auto tried = [](auto change) {
    Played played;
    change(played.post);
    bool could = true;
    const Status status = played.Run(&could);
    CHECK(status.code() == Code::kUnavailable);
    CHECK_EQ(status.rank(), 1);
    CHECK(status.message().find("damaged") != std::string::npos);
    // Its own memory may change from now on, and the other one may be reading there.
    CHECK_EQ(played.boards[1]->Stopped(), 0);
  };
  tried([](Played::Post& p) { p.parts[1] += 4; });
  tried([](Played::Post& p) { p.parts[1] = ~uint64_t{0}; });
  tried([](Played::Post& p) { p.parts[0] = 8; });
  tried([](Played::Post& p) { p.parts[0] = ~uint64_t{0}; });
  tried([](Played::Post& p) { p.bytes = 0; });
  tried([](Played::Post& p) { p.pieces = ~uint64_t{0}; });
}

// The other one had read all that it wanted, and then its call came to nothing: what
// was read there may be anything by now.
TEST(WhoGivesACallUpTakesItsMemoryAway) {
  Played played;
  played.gives_up = true;
  bool could = false;
  const Status status = played.Run(&could);
  CHECK(!could && status.code() == Code::kUnavailable);
  CHECK_EQ(status.rank(), 1);
  CHECK(status.message().find("gave the call up") != std::string::npos);
  CHECK_EQ(played.boards[1]->Stopped(), 0);
}

}  // namespace
}  // namespace ringjax
