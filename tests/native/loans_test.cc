// Messages that the peer reads where they lie: every collective with all of its
// messages lent, memory that cannot be read, and peers that lend nonsense or take it
// away.
#include "transport/loans.h"

#include <poll.h>

#include <cstring>
#include <functional>
#include <thread>

#include "base/failpoint.h"
#include "check.h"
#include "engine/call/executor.h"
#include "link_ends.h"
#include "local_world.h"
#include "transport/ring_link.h"

namespace ringjax {
namespace {

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

void CheckAllreduce(Communicator& c, size_t count) {
  std::vector<float> x(count);
  for (size_t i = 0; i < count; ++i) x[i] = static_cast<float>(i % 10 + 1);
  CHECK(c.Run(AllreduceOf(&x)).ok());
  for (size_t i = 0; i < count; ++i)
    if (x[i] != static_cast<float>(c.size()) * static_cast<float>(i % 10 + 1))
      return CHECK_EQ(x[i], static_cast<float>(i % 10 + 1));
}

void CheckAlltoall(Communicator& c, int64_t unit) {
  Call call;
  call.op = Collective::kAlltoall;
  call.name = "a";
  std::vector<float> in, out, expected;
  // Rank r sends r + t times the unit to rank t.
  for (int t = 0; t < c.size(); ++t) {
    call.rows.push_back((c.rank() + t) * unit);
    in.insert(in.end(), static_cast<size_t>((c.rank() + t) * unit),
              Value(c.rank(), static_cast<size_t>(t)));
    expected.insert(expected.end(), static_cast<size_t>((t + c.rank()) * unit),
                    Value(t, static_cast<size_t>(c.rank())));
  }
  for (int s = 0; s < c.size(); ++s) call.rows.push_back((s + c.rank()) * unit);
  out.assign(expected.size(), -1);
  call.tensors.push_back(Floats(&in, &out));
  CHECK(c.Run(call).ok());
  CHECK(out == expected);
}

const std::vector<std::vector<size_t>> kShapes = {
    {1},
    {0, 3, 1000},
    {100003},
    std::vector<size_t>(150, 37),
    {3000000},
    std::vector<size_t>(2000, 3)};  // the last: more pieces than a list may have

TEST(AllMessagesAreLent) {
  const Instead<uint64_t> all(&least_loan, 1);
  const std::vector<std::vector<int>> layouts = {
      {0, 0}, {0, 0, 0}, {0, 0, 0, 0, 0}, {0, 0, 1, 1}, {0, 1, 1}};
  for (const auto& hosts : layouts) {
    for (const size_t ring : {64, 1 << 15}) {
      World world(hosts, "", ring, 20, 0);
      world.Each([](Communicator& c) {
        for (const auto& counts : kShapes)
          for (const bool in_place : {false, true}) CheckBroadcast(c, counts, in_place);
        for (const size_t n : {1, 1000, 300001}) CheckAllreduce(c, n);
        for (const int64_t unit : {0, 1, 777, 100000}) CheckAlltoall(c, unit);
      });
    }
  }
}

// Rank 0 lends to rank 1, on this thread and another.
struct Pair {
  explicit Pair(Ends e) : ends(std::move(e)) {
    for (int side = 0; side < 2; ++side) {  // something has to have come from the peer
      char byte = 'x';
      const iovec piece{&byte, 1};
      CHECK(ends.links[side]->TryWrite({&piece, 1}).ok());
      CHECK_EQ(ends.links[1 - side]->TryRead({&piece, 1}).value(), size_t{1});
    }
  }

  Loans& lender() { return *ends.links[0]->loans(); }
  Loans& borrower() { return *ends.links[1]->loans(); }

  Status Run(int rank, std::vector<float>* data) {
    const Slice all{Region::kOut, 0, data->size()};
    Schedule schedule;
    if (rank == 0)
      schedule.steps.push_back({StepKind::kSend, 1, {}, all});
    else
      schedule.steps.push_back({StepKind::kRecv, 0, all, {}});
    Spans spans;
    spans.Add(data->data(), data->size() * sizeof(float));
    const Memory memory{&spans, &spans, {}};
    Lane lane;
    lane.links.resize(2);
    lane.links[1 - rank].reset(ends.links[rank].get());
    lane.rank = rank;
    lane.timeout = 20;
    Waiter waiter(ends.bells[rank].get(), &aborted[rank], 0, crowded);
    const Status status = Execute(Compile(schedule, 2, true), memory,
                                  {DType::kF32, DType::kF32}, {}, lane, &waiter);
    for (auto& each : lane.links) each.release();  // it is this one's
    return status;
  }

  Ends ends;
  std::atomic<bool> aborted[2] = {false, false};
  bool crowded = true;  // more ranks than cores
};

// A rank that only sends lends where it would take the peer's core, and copies where it
// has one to itself.
TEST(WhoOnlySendsAndHasACoreHelps) {
  for (const bool crowded : {false, true}) {
    Pair pair(ShmEnds(1 << 14));
    pair.crowded = crowded;
    std::vector<float> sent(1 << 20), received(sent.size(), -1);
    for (size_t i = 0; i < sent.size(); ++i) sent[i] = Value(7, i);
    std::thread sender([&] { CHECK(pair.Run(0, &sent).ok()); });
    CHECK(pair.Run(1, &received).ok());
    sender.join();
    CHECK(received == sent);
    CHECK_EQ(pair.lender().lent(), crowded ? sent.size() * sizeof(float) : 0);
  }
}

// Of what the peer cannot read, be it from the beginning or from somewhere on, the rest
// is sent, and nothing is lent any more.
TEST(WhatCannotBeReadIsSent) {
  for (const uint64_t passage : {1, 3, 4}) {  // of the four that it takes
    Pair pair(ShmEnds(1 << 14));
    std::vector<float> sent(1 << 20), received(sent.size(), -1);
    for (size_t i = 0; i < sent.size(); ++i) sent[i] = Value(7, i);
    CHECK(pair.lender().Can());
    CHECK(ArmFailpoint("memory.borrow", "not here", 0, passage).ok());
    for (int turn = 0; turn < 2; ++turn) {
      std::thread lender([&] { CHECK(pair.Run(0, &sent).ok()); });
      CHECK(pair.Run(1, &received).ok());
      lender.join();
      CHECK(received == sent);
      CHECK(!pair.lender().Can() && !pair.lender().outstanding());
      received.assign(sent.size(), -1);
    }
  }
}

// Whoever gives a call up may write to what it has lent; who was reading there hears
// it.
TEST(WhoGivesACallUpTakesItsMemoryAway) {
  Pair pair(LocalEnds(1 << 14));
  std::vector<float> sent(1 << 20);
  std::thread lender([&] { CHECK(!pair.Run(0, &sent).ok()); });
  while (!pair.borrower().HasLent()) std::this_thread::yield();
  pair.aborted[0] = true;
  pair.ends.bells[0]->Ring();
  lender.join();
  CHECK(pair.borrower().gone());
  std::vector<float> received(sent.size());
  const Status status = pair.Run(1, &received);
  CHECK(status.code() == Code::kUnavailable);
  CHECK_EQ(status.rank(), 0);
  CHECK(status.message().find("gave the call up") != std::string::npos);
}

// Calls `claim` with a pair and with the block that its two sides share.
void WithBlock(const std::function<void(Pair*, RingPair*)>& claim) {
  Ends ends = WithBells();
  const int memfd = MakeMemfd(ShmBytes(1 << 14));
  void* block =
      mmap(nullptr, ShmBytes(1 << 14), PROT_READ | PROT_WRITE, MAP_SHARED, memfd, 0);
  CHECK(block != MAP_FAILED);
  for (int side = 0; side < 2; ++side)
    ends.links[side] = std::move(MakeShmLink(dup(memfd), side, 1 << 14,
                                             dup(ends.bells[1 - side]->fd()), getpid())
                                     .value());
  close(memfd);
  {
    Pair pair(std::move(ends));
    claim(&pair, reinterpret_cast<RingPair*>(block));
  }
  munmap(block, ShmBytes(1 << 14));
}

// The lender loads `reads` and `taken` of the borrower once for a decision: a borrower
// may take more and refuse at any moment, and what it took must not be sent again.
TEST(HowMuchIsTakenAndWhetherTheRestIsRefusedAreOneLook) {
  WithBlock([](Pair* pair, RingPair* shared) {
    LoanSide& borrower = shared->sides[1].loans;
    Loans& lender = pair->lender();
    lender.Lend(100);
    StoreShared(borrower.taken, uint64_t{40});
    CHECK_EQ(lender.Taken().value(), uint64_t{0});  // not yet news
    StoreShared(borrower.taken, uint64_t{60});
    StoreShared(borrower.reads, kCannotRead);
    CHECK(!lender.refused());  // as the last look was
    CHECK(lender.HasTaken());
    CHECK_EQ(lender.Taken().value(), uint64_t{60});
    CHECK(lender.refused() && !lender.outstanding());
  });
}

// What was read while the lender took its memory away counts for nothing.
TEST(WhatIsTakenAwayWhileItIsReadIsNotTaken) {
  Pair pair(LocalEnds(1 << 14));
  char from[8] = "before", to[8] = "";
  const iovec there{from, sizeof from}, here{to, sizeof to};
  pair.lender().Lend(sizeof from);
  CHECK_EQ(pair.borrower().Ready().value(), sizeof from);
  pair.lender().Withdraw();
  const auto read = pair.borrower().Borrow({&here, 1}, {&there, 1});
  CHECK(read.status().message().find("gave the call up") != std::string::npos);
}

TEST(ALenderThatSleepsIsWokenByTheLastByteTaken) {
  Pair pair(LocalEnds(1 << 14));
  pair.lender().Lend(100);
  CHECK_EQ(pair.lender().Taken().value(), uint64_t{0});
  std::vector<pollfd> none;
  CHECK(!pair.ends.links[0]->Arm(false, true, &none));
  CHECK_EQ(pair.borrower().Ready().value(), uint64_t{100});
  pollfd bell{pair.ends.bells[0]->fd(), POLLIN, 0};
  pair.borrower().Take(99);
  CHECK_EQ(poll(&bell, 1, 0), 0);  // it could do little yet
  pair.borrower().Take(1);
  CHECK_EQ(poll(&bell, 1, 0), 1);
}

// Either side: a loan of which the rest will not come is an error at once.
TEST(WhoClosesALinkEndsALoan) {
  const auto closed = [](const Status& status) {
    return status.code() == Code::kUnavailable &&
           status.message().find("closed the link") != std::string::npos;
  };
  for (const int side : {0, 1}) {
    Pair pair(ShmEnds(1 << 14));
    Loans& lender = pair.lender();
    Loans& borrower = pair.borrower();
    lender.Lend(100);
    CHECK_EQ(borrower.Ready().value(), uint64_t{100});
    borrower.Take(60);
    pair.ends.links[side].reset();
    if (side == 1) CHECK(closed(lender.Taken().status()));
    if (side == 1) continue;
    CHECK_EQ(borrower.Ready().value(), uint64_t{40});
    borrower.Take(40);
    CHECK(closed(borrower.Ready().status()));
  }
}

// Whose memory a link reads is the kernel's word, and each read proves it.
TEST(OnlyTheMemoryOfTheProcessThatProvesItIsRead) {
  uint64_t number = 5, value = 7, copy = 0;
  const Proof proof{reinterpret_cast<uintptr_t>(&number), 5};
  const iovec from{&value, sizeof value}, to{&copy, sizeof copy};
  CHECK(!ProcessMemory(0, proof).CanRead());
  CHECK(!ProcessMemory(getpid(), {proof.at, 6}).CanRead());
  const ProcessMemory memory(getpid(), proof);
  CHECK(memory.CanRead());
  CHECK_EQ(memory.Read({&to, 1}, {&from, 1}), static_cast<ptrdiff_t>(sizeof value));
  CHECK_EQ(copy, value);
  number = 6;  // another process has that number now
  CHECK_EQ(memory.Read({&to, 1}, {&from, 1}), ptrdiff_t{-1});
}

// A peer's loan is not taken where this side may not read the peer.
TEST(ALoanOfAPeerThatCannotBeReadIsOutOfStep) {
  Pair pair(ShmEnds(1 << 14, 0));
  CHECK(!pair.lender().Can() && !pair.borrower().may_borrow());
  std::vector<float> data(1000), unused(1000);
  Frame frame;
  frame.kind = static_cast<uint16_t>(FrameKind::kLoan);
  frame.bytes = data.size() * sizeof(float);
  frame.beside = 1;
  const iovec list{data.data(), frame.bytes};
  const iovec out[2] = {{&frame, sizeof frame},
                        {const_cast<iovec*>(&list), sizeof list}};
  CHECK(pair.ends.links[0]->TryWrite(out).ok());
  const Status status = pair.Run(1, &unused);
  CHECK(status.message().find("out of step") != std::string::npos);
}

// A peer that writes into the shared block what it likes.
TEST(ImpossibleLoansAreDamage) {
  const auto tried = WithBlock;
  const auto damaged = [](const Result<uint64_t>& result) {
    return result.status().message().find("impossible loan") != std::string::npos;
  };
  tried([&](Pair* pair, RingPair* shared) {
    pair->lender().Lend(100);
    StoreShared(shared->sides[1].loans.taken, uint64_t{101});
    CHECK(damaged(pair->lender().Taken()));
    StoreShared(shared->sides[1].loans.taken, ~uint64_t{0});
    CHECK(damaged(pair->lender().Taken()));
  });
  tried([&](Pair* pair, RingPair* shared) {
    pair->lender().Lend(100);
    CHECK_EQ(pair->borrower().Ready().value(), uint64_t{100});
    StoreShared(shared->sides[0].loans.lent, uint64_t{99});
    CHECK(damaged(pair->borrower().Ready()));
  });
}

// Lists that do not add up, of no pieces, of too many, or where nobody can lend.
TEST(ListsThatCannotBeAreOutOfStep) {
  const auto tried = [](Ends ends, uint64_t pieces, uint64_t each) {
    Pair pair(std::move(ends));
    std::vector<float> data(1000), unused(1000);
    Frame frame;
    frame.kind = static_cast<uint16_t>(FrameKind::kLoan);
    frame.bytes = data.size() * sizeof(float);
    frame.beside = pieces;
    const std::vector<iovec> list(std::min<uint64_t>(pieces, 300),
                                  iovec{data.data(), each});
    const iovec out[2] = {
        {&frame, sizeof frame},
        {const_cast<iovec*>(list.data()), list.size() * sizeof(iovec)}};
    CHECK(pair.ends.links[0]->TryWrite(out).ok());
    CHECK(pair.ends.links[0]->Flush().ok());
    const Status status = pair.Run(1, &unused);
    CHECK(status.code() == Code::kInternal);
    CHECK(status.message().find("out of step") != std::string::npos);
  };
  tried(LocalEnds(1 << 14), 1, 3996);
  tried(LocalEnds(1 << 14), 2, 4000);
  tried(LocalEnds(1 << 14), 2, ~uint64_t{0} / 2);
  tried(LocalEnds(1 << 14), 0, 0);
  tried(LocalEnds(1 << 14), 257, 4000);
  tried(LocalEnds(1 << 14), ~uint64_t{0}, 4000);
  tried(SocketEnds(1, UnixPair), 1, 4000);
}

}  // namespace
}  // namespace ringjax
