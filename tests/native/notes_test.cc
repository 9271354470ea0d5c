// Short calls as notes: around the size of a note, ragged, and what does not fit one on
// some ranks only.
#include "engine/call/notes.h"

#include <numeric>

#include "check.h"
#include "local_world.h"

namespace ringjax {
namespace {

using Values32 = std::vector<float>;

uint64_t NoteFloats(int size) {
  std::vector<std::unique_ptr<Doorbell>> bells;
  std::vector<Doorbell*> all;
  for (int r = 0; r < size; ++r) all.push_back(bells.emplace_back(MakeBell()).get());
  return MakeLocalBoards(4096, all)[0]->note_bytes() / sizeof(float);
}

// Of rank `from`, for rank `to`, at place i.
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

uint64_t Notes(const World& world, const std::string& op) {
  const auto all = world.ranks[0]->stats();
  const auto& algorithms = all.at(op).algorithms;
  const auto found = algorithms.find(kShared);
  return found == algorithms.end() ? 0 : static_cast<uint64_t>(found->second);
}

TEST(AlltoallsOfAllShapesAreNotesIfTheyFitOnAllRanks) {
  for (const int size : {2, 3, 5}) {
    World world(std::vector<int>(static_cast<size_t>(size), 0));
    const auto n = static_cast<size_t>(size);
    const auto note = static_cast<int64_t>(NoteFloats(size));
    std::vector<std::vector<int64_t>> rows(n, std::vector<int64_t>(n, 3));
    Exchange(world, rows);
    for (size_t r = 0; r < n; ++r)
      for (size_t to = 0; to < n; ++to) rows[r][to] = static_cast<int64_t>(r + 2 * to);
    Exchange(world, rows);
    CHECK_EQ(Notes(world, "alltoall"), 2u);
    rows[n - 1][0] = note;  // with its table, that is too much for one rank
    for (int i = 0; i < 3; ++i) Exchange(world, rows);
    CHECK_EQ(Notes(world, "alltoall"), 2u);
    for (auto& row : rows) row.assign(n, 0);  // nothing at all
    Exchange(world, rows);
    rows[0][n - 1] = 1;
    Exchange(world, rows);
    CHECK_EQ(Notes(world, "alltoall"), 4u);
  }
}

TEST(WhatIsAboutAsLongAsANoteIsRight) {
  for (const int size : {2, 3, 5, 20}) {
    World world(std::vector<int>(static_cast<size_t>(size), 0));
    const uint64_t note = NoteFloats(size);
    for (const uint64_t n : {uint64_t{1}, note - 1, note, note + 1}) {
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

TEST(SplitsThatDoNotFitAreFoundInTheNotes) {
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

}  // namespace
}  // namespace ringjax
