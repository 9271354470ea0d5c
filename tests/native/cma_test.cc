// Single copy by CMA: every collective with all of its messages read by CMA, memory
// that cannot be read, and peers that announce nonsense or invalidate their bytes.
#include "transport/cma.h"

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

TEST(EveryCollectiveWithAllMessagesReadByCma) {
  const Override<uint64_t> all(&least_cma, 1);
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

// Two ranks of which rank 0 sends to rank 1: one on this thread, one on another.
struct CmaPair {
  explicit CmaPair(Ends e) : ends(std::move(e)) {
    for (int side = 0; side < 2; ++side) {  // so that each has the proof
      char byte = 'x';
      const iovec piece{&byte, 1};
      CHECK(ends.links[side]->TryWrite({&piece, 1}).ok());
      CHECK_EQ(ends.links[1 - side]->TryRead({&piece, 1}).value(), size_t{1});
    }
  }

  CmaEndpoint& sender() { return *ends.links[0]->cma(); }
  CmaEndpoint& receiver() { return *ends.links[1]->cma(); }

  Status Run(int rank, std::vector<float>* data) {
    const Slice all{Region::kOut, 0, data->size()};
    Schedule schedule;
    if (rank == 0)
      schedule.steps.push_back({StepKind::kSend, 1, {}, all});
    else
      schedule.steps.push_back({StepKind::kRecv, 0, all, {}});
    Spans spans;
    spans.Add(data->data(), data->size() * sizeof(float));
    const Buffers buffers{&spans, &spans, {}};
    Endpoints endpoints;
    endpoints.links.resize(2);
    endpoints.links[1 - rank].reset(ends.links[rank].get());
    endpoints.rank = rank;
    endpoints.timeout = 20;
    Waiter waiter(ends.bells[rank].get(), &aborted[rank], 0, oversubscribed);
    const Status status = Execute(Compile(schedule, 2, true), buffers,
                                  {DType::kF32, DType::kF32}, {}, endpoints, &waiter);
    for (auto& each : endpoints.links) each.release();  // `ends` owns them
    return status;
  }

  Ends ends;
  std::atomic<bool> aborted[2] = {false, false};
  bool oversubscribed = true;  // more ranks than cores
};

// On an oversubscribed host, a rank that only sends leaves the copy to the peer,
// because its own copy would take the core from the peer. With a core of its own it
// copies.
TEST(ASenderWithACoreOfItsOwnCopiesIntoTheRing) {
  for (const bool oversubscribed : {false, true}) {
    CmaPair pair(ShmEnds(1 << 14));
    pair.oversubscribed = oversubscribed;
    std::vector<float> sent(1 << 20), received(sent.size(), -1);
    for (size_t i = 0; i < sent.size(); ++i) sent[i] = Value(7, i);
    std::thread sender([&] { CHECK(pair.Run(0, &sent).ok()); });
    CHECK(pair.Run(1, &received).ok());
    sender.join();
    CHECK(received == sent);
    CHECK_EQ(pair.sender().exposed(), oversubscribed ? sent.size() * sizeof(float) : 0);
  }
}

// If the peer cannot read some bytes, these and all later bytes are sent through the
// ring, and the sender exposes nothing more.
TEST(BytesThatCannotBeReadAreSentThroughTheRing) {
  for (const uint64_t passage : {1, 3, 4}) {  // the read that fails; a message has four
    CmaPair pair(ShmEnds(1 << 14));
    std::vector<float> sent(1 << 20), received(sent.size(), -1);
    for (size_t i = 0; i < sent.size(); ++i) sent[i] = Value(7, i);
    CHECK(pair.sender().PeerCanRead());
    CHECK(ArmFailpoint("cma.read", "not here", 0, passage).ok());
    for (int turn = 0; turn < 2; ++turn) {
      std::thread sender([&] { CHECK(pair.Run(0, &sent).ok()); });
      CHECK(pair.Run(1, &received).ok());
      sender.join();
      CHECK(received == sent);
      CHECK(!pair.sender().PeerCanRead() && !pair.sender().outstanding());
      received.assign(sent.size(), -1);
    }
  }
}

// After a failed call its caller may write to the buffer, so a peer must not use it.
TEST(ACallThatFailsInvalidatesItsBytes) {
  CmaPair pair(LocalEnds(1 << 14));
  std::vector<float> sent(1 << 20);
  std::thread sender([&] { CHECK(!pair.Run(0, &sent).ok()); });
  while (!pair.receiver().HasExposed()) std::this_thread::yield();
  pair.aborted[0] = true;
  pair.ends.bells[0]->Ring();
  sender.join();
  CHECK(pair.receiver().invalidated());
  std::vector<float> received(sent.size());
  const Status status = pair.Run(1, &received);
  CHECK(status.code() == Code::kUnavailable);
  CHECK_EQ(status.rank(), 0);
  CHECK(status.message().find("gave the call up") != std::string::npos);
}

// Calls `claim` with a pair and with the block that its two sides share.
void WithBlock(const std::function<void(CmaPair*, RingPair*)>& claim) {
  CmaPair pair(ShmEnds(1 << 14));
  claim(&pair, SharedBy(pair.ends));
}

// The sender loads `can_read` and `acknowledged` of the receiver once for a decision:
// a receiver may acknowledge more and fall back at any moment, and bytes that it has
// acknowledged must not be sent again.
TEST(TheAcknowledgedCountAndTheFallbackAreLoadedOnce) {
  WithBlock([](CmaPair* pair, RingPair* shared) {
    CmaState& receiver = shared->sides[1].cma;
    CmaEndpoint& sender = pair->sender();
    sender.Expose(100);
    StoreShared(receiver.acknowledged, uint64_t{40});
    CHECK_EQ(sender.PollAcknowledged().value(), uint64_t{0});  // not due yet
    StoreShared(receiver.acknowledged, uint64_t{60});
    StoreShared(receiver.can_read, kCannotRead);
    CHECK(!sender.fell_back());  // as PollAcknowledged saw it
    CHECK(sender.HasAcknowledged());
    CHECK_EQ(sender.PollAcknowledged().value(), uint64_t{60});
    CHECK(sender.fell_back() && !sender.outstanding());
  });
}

// Bytes that were invalidated while they were read are not used.
TEST(BytesThatAreInvalidatedWhileTheyAreReadAreNotUsed) {
  CmaPair pair(LocalEnds(1 << 14));
  char from[8] = "before", to[8] = "";
  const iovec there{from, sizeof from}, here{to, sizeof to};
  pair.sender().Expose(sizeof from);
  CHECK_EQ(pair.receiver().PollExposed().value(), sizeof from);
  pair.sender().Invalidate();
  const auto read = pair.receiver().Read({&here, 1}, {&there, 1});
  CHECK(read.status().message().find("gave the call up") != std::string::npos);
}

TEST(ASenderThatSleepsIsWokenByTheLastAcknowledgement) {
  CmaPair pair(LocalEnds(1 << 14));
  pair.sender().Expose(100);
  CHECK_EQ(pair.sender().PollAcknowledged().value(), uint64_t{0});
  std::vector<pollfd> none;
  CHECK(!pair.ends.links[0]->Arm(false, true, &none));
  CHECK_EQ(pair.receiver().PollExposed().value(), uint64_t{100});
  const auto rings = [&] { return LoadShared(pair.ends.bells[0]->words(0).rings); };
  const uint32_t before = rings();
  pair.receiver().Acknowledge(99);
  CHECK_EQ(rings(), before);  // the sender can do little with a part
  pair.receiver().Acknowledge(1);
  CHECK_EQ(rings(), before + 1);
}

// If one side closes, an incomplete message fails at once on the other side.
TEST(ClosingALinkEndsASingleCopy) {
  const auto closed = [](const Status& status) {
    return status.code() == Code::kUnavailable &&
           status.message().find("closed the link") != std::string::npos;
  };
  for (const int side : {0, 1}) {
    CmaPair pair(ShmEnds(1 << 14));
    CmaEndpoint& sender = pair.sender();
    CmaEndpoint& receiver = pair.receiver();
    sender.Expose(100);
    CHECK_EQ(receiver.PollExposed().value(), uint64_t{100});
    receiver.Acknowledge(60);
    pair.ends.links[side].reset();
    if (side == 1) CHECK(closed(sender.PollAcknowledged().status()));
    if (side == 1) continue;
    CHECK_EQ(receiver.PollExposed().value(), uint64_t{40});
    receiver.Acknowledge(40);
    CHECK(closed(receiver.PollExposed().status()));
  }
}

// A process id may belong to another process meanwhile, so each read checks the proof.
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
  number = 6;  // as if another process had this id now
  CHECK_EQ(memory.Read({&to, 1}, {&from, 1}), ptrdiff_t{-1});
}

// An announcement is refused if this side cannot read the peer's memory.
TEST(AnAnnouncementByAPeerThatCannotBeReadIsOutOfStep) {
  Ends ends = ShmEnds(1 << 14);
  for (int side = 0; side < 2; ++side)
    StoreShared(ends.bells[side]->words(side).process, 0);
  CmaPair pair(std::move(ends));
  CHECK(!pair.sender().PeerCanRead() && !pair.receiver().can_read());
  std::vector<float> data(1000), unused(1000);
  Frame frame;
  frame.kind = static_cast<uint16_t>(FrameKind::kCma);
  frame.bytes = data.size() * sizeof(float);
  frame.attached = 1;
  const iovec list{data.data(), frame.bytes};
  const iovec out[2] = {{&frame, sizeof frame},
                        {const_cast<iovec*>(&list), sizeof list}};
  CHECK(pair.ends.links[0]->TryWrite(out).ok());
  const Status status = pair.Run(1, &unused);
  CHECK(status.message().find("out of step") != std::string::npos);
}

// Plays a peer that writes impossible counts into the shared block.
TEST(ImpossibleByteCountsAreDamage) {
  const auto tried = WithBlock;
  const auto damaged = [](const Result<uint64_t>& result) {
    return result.status().message().find("impossible byte count") != std::string::npos;
  };
  tried([&](CmaPair* pair, RingPair* shared) {
    pair->sender().Expose(100);
    StoreShared(shared->sides[1].cma.acknowledged, uint64_t{101});
    CHECK(damaged(pair->sender().PollAcknowledged()));
    StoreShared(shared->sides[1].cma.acknowledged, ~uint64_t{0});
    CHECK(damaged(pair->sender().PollAcknowledged()));
  });
  tried([&](CmaPair* pair, RingPair* shared) {
    pair->sender().Expose(100);
    CHECK_EQ(pair->receiver().PollExposed().value(), uint64_t{100});
    StoreShared(shared->sides[0].cma.exposed, uint64_t{99});
    CHECK(damaged(pair->receiver().PollExposed()));
  });
}

// Tries lists with a wrong sum, no pieces or too many, and a link without CMA.
TEST(ImpossibleListsAreOutOfStep) {
  const auto tried = [](Ends ends, uint64_t pieces, uint64_t each) {
    CmaPair pair(std::move(ends));
    std::vector<float> data(1000), unused(1000);
    Frame frame;
    frame.kind = static_cast<uint16_t>(FrameKind::kCma);
    frame.bytes = data.size() * sizeof(float);
    frame.attached = pieces;
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
