// One plan on two links, for tests that choose the kind of link. engine_test.cc
// compares the results of plans.
#include "engine/call/executor.h"

#include <chrono>
#include <thread>

#include "check.h"
#include "link_ends.h"

namespace ringjax {
namespace {

constexpr uint64_t kCount = 100000;

// Runs one step with the peer on this thread.
Status RunStep(int rank, Link* link, Doorbell* bell, std::vector<float>* data) {
  const Slice all{Region::kOut, 0, kCount};
  Schedule schedule;
  if (rank == 0)
    schedule.steps.push_back({StepKind::kSend, 1, {}, all});
  else
    schedule.steps.push_back({StepKind::kRecv, 0, all, {}});
  Spans spans;
  spans.Add(data->data(), kCount * sizeof(float));
  const Buffers buffers{&spans, &spans, {}};
  Endpoints endpoints;
  endpoints.links.resize(2);
  endpoints.links[1 - rank].reset(link);
  endpoints.rank = rank;
  endpoints.timeout = 10;
  const std::atomic<bool> aborted = false;
  Waiter waiter(bell, &aborted, 0, true);
  waiter.set_slice(std::chrono::hours(1));  // no lost wake-up is repaired
  const Status status = Execute(Compile(schedule, 2, true), buffers,
                                {DType::kF32, DType::kF16}, {}, endpoints, &waiter);
  for (auto& each : endpoints.links) each.release();  // the caller owns the links
  return status;
}

// Elements converted for the wire are staged if the socket is full. A send has ended
// only when all staged bytes are sent, however slow the peer is.
TEST(ASendOnAFullSocketEndsWhenAllBytesAreSent) {
  Ends ends = SocketEnds(1, [] {
    const auto pair = UnixPair();
    const int little = 4096;
    setsockopt(pair.first, SOL_SOCKET, SO_SNDBUF, &little, sizeof little);
    return pair;
  });
  std::vector<float> sent(kCount), received(kCount, -1.0f);
  for (size_t i = 0; i < kCount; ++i) sent[i] = static_cast<float>(i % 1000);
  std::atomic<bool> over = false;
  std::thread sender([&] {
    CHECK(RunStep(0, ends.links[0].get(), ends.bells[0].get(), &sent).ok());
    over = true;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  CHECK(!over);
  // The socket is full dozens of times, and the sender sleeps until there is room.
  CHECK(RunStep(1, ends.links[1].get(), ends.bells[1].get(), &received).ok());
  sender.join();
  CHECK(received == sent);
}

}  // namespace
}  // namespace ringjax
