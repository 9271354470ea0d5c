// Sums that are lent instead of posted: the same bits, memory that cannot be read,
// lists that cannot be, ranks that give a call up while others read, and what is
// chosen.
#include "engine/call/tile_loans.h"

#include <sys/mman.h>

#include <cstring>
#include <random>
#include <thread>

#include "check.h"
#include "engine/call/loan_pace.h"
#include "engine/call/tiles.h"
#include "local_world.h"
#include "transport/loans.h"

namespace ringjax {
namespace {

constexpr size_t kTile = 4096;

void Randomly(int rank, std::vector<float>* data) {
  std::mt19937 random(static_cast<unsigned>(rank));
  std::uniform_real_distribution<float> any(-1, 1);
  for (float& x : *data) x = any(random);
}

Call ReducescatterOf(std::vector<float>* in, std::vector<float>* out,
                     std::vector<int64_t> rows) {
  Call call = AllgatherOf(in, out, std::move(rows));
  call.op = Collective::kReducescatter;
  return call;
}

// A world whose ranks have found out, in their first long message, who can read whose
// memory.
struct Acquainted : World {
  explicit Acquainted(int ranks)
      : World(std::vector<int>(static_cast<size_t>(ranks), 0), "", 4096, 20, kTile) {
    const Instead least(&least_lent_tiles, ~uint64_t{0});
    Each([](Communicator& c) {
      std::vector<float> any(20000);
      CHECK(c.Run(AllreduceOf(&any)).ok());
    });
  }
};

// All ranks' results, one after the other, of one allreduce and one reducescatter.
std::vector<float> Sums(int ranks, size_t count, bool lent, bool in_place) {
  Acquainted world(ranks);
  const Instead least(&least_lent_tiles, lent ? 0 : ~uint64_t{0});
  std::vector<std::vector<float>> results(static_cast<size_t>(ranks));
  world.Each([&](Communicator& c) {
    std::vector<float> in(count), out(count, -1);
    Randomly(c.rank(), &in);
    const std::vector<float> before = in;
    Call call = AllreduceOf(&in, ReduceOp::kAverage);
    if (!in_place) call.tensors[0].out = out.data();
    CHECK(c.Run(call).ok());
    if (!in_place) CHECK(in == before);
    std::vector<float>& result = results[static_cast<size_t>(c.rank())];
    result = in_place ? in : out;
    std::vector<int64_t> rows(static_cast<size_t>(c.size()), 0);
    rows[0] = 5;
    rows.back() += static_cast<int64_t>(count) - 5;
    std::vector<float> part(static_cast<size_t>(rows[static_cast<size_t>(c.rank())]));
    in = before;
    CHECK(c.Run(ReducescatterOf(&in, &part, rows)).ok());
    CHECK(in == before);
    result.insert(result.end(), part.begin(), part.end());
    for (const char* op : {"allreduce", "reducescatter"})
      CHECK_EQ(c.stats().at(op).algorithms.count(kLent), lent ? 1u : 0u);
  });
  std::vector<float> all;
  for (const auto& each : results) all.insert(all.end(), each.begin(), each.end());
  return all;
}

TEST(LentSumsHaveTheSameBits) {
  for (const int ranks : {2, 3, 5})
    for (const size_t count : {20000, 34567, 300001})
      for (const bool in_place : {false, true})
        CHECK(Sums(ranks, count, true, in_place) ==
              Sums(ranks, count, false, in_place));
}

// What travels as something else, or scaled, and more pieces than a list may have.
TEST(WhatCannotBeLentIsPosted) {
  Acquainted world(3);
  const Instead least(&least_lent_tiles, 0);
  world.Each([](Communicator& c) {
    std::vector<float> data(20000, 1);
    Call call = AllreduceOf(&data);
    call.wire = static_cast<int>(DType::kBF16);
    CHECK(c.Run(call).ok());
    CHECK(data == std::vector<float>(20000, 3));
    call = AllreduceOf(&data);
    call.prescale = 0.5;
    CHECK(c.Run(call).ok());
    CHECK(data == std::vector<float>(20000, 4.5));
    std::vector<std::vector<float>> many(400, std::vector<float>(50, 1));
    call.prescale = 1;
    call.tensors.clear();
    for (auto& each : many) call.tensors.push_back(Floats(&each, &each));
    CHECK(c.Run(call).ok());
    for (const auto& each : many) CHECK(each == std::vector<float>(50, 3));
    CHECK_EQ(c.stats().at("allreduce").algorithms.at(kShared), 4u);
  });
}

// One rank has too many pieces; the others lend.
TEST(SomeLendAndOthersPost) {
  Acquainted world(3);
  const Instead least(&least_lent_tiles, 0);
  world.Each([](Communicator& c) {
    std::vector<std::vector<float>> pieces(400);
    std::vector<float> whole(400 * 50);
    for (size_t i = 0; i < whole.size(); ++i) whole[i] = static_cast<float>(i % 97);
    Call call = AllreduceOf(&whole);
    call.tensors.clear();
    for (size_t k = 0; k < pieces.size(); ++k) {
      const auto first = whole.begin() + static_cast<std::ptrdiff_t>(50 * k);
      pieces[k].assign(first, first + 50);
      float* const data = c.rank() == 1 ? pieces[k].data() : &whole[50 * k];
      call.tensors.push_back({DType::kF32, {50}, data, data, 200});
    }
    CHECK(c.Run(call).ok());
    for (size_t i = 0; i < whole.size(); ++i) {
      const float got = c.rank() == 1 ? pieces[i / 50][i % 50] : whole[i];
      if (got != static_cast<float>(3 * (i % 97)))
        return CHECK_EQ(got, static_cast<float>(3 * (i % 97)));
    }
    const size_t lent = c.stats().at("allreduce").algorithms.count(kLent);
    CHECK_EQ(lent, c.rank() == 1 ? 0u : 1u);
  });
}

// The loans of two ranks, and what one of them shows.
struct Two {
  Two() {
    auto boards = MakeLocalBoards(kTile, {bells[0].get(), bells[1].get()});
    for (size_t r = 0; r < 2; ++r) {
      lanes[r].rank = static_cast<int>(r);
      lanes[r].board = std::move(boards[r]);
      lanes[r].links.resize(2);
      spans[r].Add(data[r].data(), data[r].size() * sizeof(float));
      memories[r].in = memories[r].out = &spans[r];
    }
    std::tie(lanes[0].links[1], lanes[1].links[0]) =
        MakeLocalLinks(4096, bells[0].get(), bells[1].get());
    for (size_t r = 0; r < 2; ++r) lanes[r].links[1 - r]->loans()->Meet();
  }
  std::byte* slot() { return lanes[1].board->Area(1); }

  std::unique_ptr<Doorbell> bells[2] = {MakeBell(), MakeBell()};
  std::vector<float> data[2] = {std::vector<float>(1000, 1),
                                std::vector<float>(1000, 2)};
  Spans spans[2];
  Memory memories[2];
  Lane lanes[2];
};

TEST(MemoryThatNobodyReadsIsNotLent) {
  Two two;
  void* const closed =
      mmap(nullptr, 8192, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  Spans spans;
  spans.Add(two.data[1].data(), 100);
  spans.Add(closed, 8192);
  const Memory memory{&spans, &two.spans[1], {}};
  TileLoans loans(memory, two.lanes[1], true);
  CHECK(loans.mine());
  loans.Show(two.slot(), kTile);
  CHECK(!loans.mine());
  CHECK_EQ(two.lanes[0].board->Get(Board::kLends, 1), 0u);
  munmap(closed, 8192);
}

TEST(OnlyWhatThePeersCanReadIsLent) {
  Two two;
  two.lanes[0].links[1]->loans()->Refuse();
  CHECK(!TileLoans(two.memories[1], two.lanes[1], true).mine());
  CHECK(TileLoans(two.memories[0], two.lanes[0], true).mine());
}

TEST(WhatWasGivenUpIsNotTrusted) {
  Two two;
  TileLoans reader(two.memories[0], two.lanes[0], false);
  std::vector<float> got(10);
  const iovec to{got.data(), 40};
  {
    TileLoans lender(two.memories[1], two.lanes[1], true);
    lender.Show(two.slot(), kTile);
    CHECK(reader.Learn(1, two.slot(), kTile).ok());
    CHECK(reader.Values(1, 3960, {to}).ok());
    CHECK(got == std::vector<float>(10, 2));
  }
  for (const Status& status : {reader.Values(1, 0, {to}), reader.Results(1, 0, {to})}) {
    CHECK(status.code() == Code::kUnavailable);
    CHECK(status.message().find("gave the call up") != std::string::npos);
    CHECK_EQ(status.rank(), 1);
  }
}

TEST(ImpossibleListsAreDamage) {
  struct {
    uint64_t values, results;
    iovec piece;
  } list{};
  const auto learnt = [&list](uint64_t bytes) {
    Two two;
    two.lanes[1].board->Set(Board::kLends, 1);
    std::memcpy(two.slot(), &list, sizeof list);
    return TileLoans(two.memories[0], two.lanes[0], false).Learn(1, two.slot(), bytes);
  };
  std::vector<float> data(1000);
  list = {1, 0, {data.data(), 4000}};
  CHECK(learnt(kTile).ok());
  CHECK(!learnt(8).ok());   // not even the numbers
  CHECK(!learnt(16).ok());  // no room for a piece
  for (const uint64_t values : {uint64_t{0}, uint64_t{2}, kTile, ~uint64_t{0}}) {
    list = {values, 0, {data.data(), 3999}};
    const Status status = learnt(kTile);
    CHECK(status.message().find("impossible loan") != std::string::npos);
    CHECK_EQ(status.rank(), 1);
  }
  list = {1, ~uint64_t{0}, {data.data(), 4000}};
  CHECK(!learnt(kTile).ok());
}

// Reads where nothing is: an error, not what happens to be in a buffer.
TEST(WhereNothingIsNothingIsRead) {
  Two two;
  struct {
    uint64_t values, results;
    iovec pieces[2];
  } list{1, 1, {{nullptr, 4000}, {two.data[1].data(), 400}}};
  two.lanes[1].board->Set(Board::kLends, 1);
  std::memcpy(two.slot(), &list, sizeof list);
  TileLoans loans(two.memories[0], two.lanes[0], false);
  CHECK(loans.Learn(1, two.slot(), kTile).ok());
  std::vector<float> got(200);
  const iovec to{got.data(), 800};
  for (const Status& status : {loans.Values(1, 0, {to}), loans.Results(1, 0, {to})}) {
    CHECK(status.code() == Code::kUnavailable);
    CHECK(status.message().find("cannot be read") != std::string::npos);
    CHECK_EQ(status.rank(), 1);
  }
}

// Messages of one kind on a machine where they take so long; which were lent.
class Machine {
 public:
  int Send(int count, double posted, double lent, uint64_t bytes = 64 << 20) {
    const int kind = LoanPace::Kind(false, bytes);
    int lends = 0;
    for (int i = 0; i < count; ++i) {
      const bool lend = pace_.wish() >> kind & 1;
      lends += lend;
      pace_.Took(kind, lend, bytes, (lend ? lent : posted) * (i % 5 == 2 ? 1.3 : 1));
    }
    return lends;
  }
  const LoanPace& pace() const { return pace_; }

 private:
  LoanPace pace_;
};

TEST(WhatIsQuickerIsChosen) {
  Machine near;
  CHECK(near.Send(5000, 8, 12) < 60);
  CHECK_EQ(near.pace().wish(), 0u);
  Machine far;
  CHECK(far.Send(5000, 33, 12) > 4900);
  Machine changing;
  changing.Send(2000, 8, 12);
  CHECK(changing.Send(100, 33, 12) >= 85);  // it is noticed at once
  CHECK(changing.Send(2000, 8, 12) < 300);  // and tried now and then
  CHECK(changing.Send(100, 33, 12) >= 85);
}

TEST(SizesAreAskedEachForItself) {
  Machine machine;
  for (int i = 0; i < 100; ++i) {
    machine.Send(1, 33, 12, 64 << 20);
    machine.Send(1, 1, 2, 1 << 20);
  }
  CHECK_EQ(machine.pace().wish(), 1u << LoanPace::Kind(false, 64 << 20));
  CHECK(LoanPace::Kind(false, ~uint64_t{0}) < LoanPace::Kind(true, 1));
  CHECK(LoanPace::Kind(true, ~uint64_t{0}) < 32);
}

// Rank 0 wishes, but what it has cannot be lent: it asks less and less often.
TEST(AWishThatCannotBeIsGivenUp) {
  LoanPace pace;
  const int kind = LoanPace::Kind(true, 1 << 20);
  int wished = 0;
  for (int i = 0; i < 3000; ++i) {
    wished += pace.wish() >> kind & 1;
    pace.Took(kind, false, 1 << 20, 1);
  }
  CHECK(wished > 0 && wished < 50);
}

}  // namespace
}  // namespace ringjax
