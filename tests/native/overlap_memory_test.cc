// The memory between START and DONE: an arena, which is mapped twice so that every
// block is contiguous, and windows of buckets of all sizes that wrap around in the
// arena. engine_test.cc tests the results of overlap.
#include <cstring>
#include <deque>
#include <random>
#include <thread>

#include "check.h"
#include "engine/communicator/arena.h"
#include "engine/communicator/overlap.h"
#include "local_world.h"

namespace ringjax {
namespace {

TEST(ABlockThatRunsOverTheEndIsContiguous) {
  Arena arena;
  CHECK(arena.Take(1) == nullptr);
  arena.Grow(8192);
  std::byte* a = arena.Take(6000);
  std::byte* b = arena.Take(2000);
  CHECK(arena.Take(193) == nullptr);  // 8000 of 8192 are taken
  arena.Give(a);
  std::byte* c = arena.Take(6100);
  CHECK(c == b + 2000);
  std::memset(b, 1, 2000);
  std::memset(c, 2, 6100);
  // The part of c behind the end is at the front, below where b begins.
  CHECK(a[0] == std::byte{2} && a[5907] == std::byte{2} && b[0] == std::byte{1});
  CHECK(b[1999] == std::byte{1} && c[6099] == std::byte{2});
}

TEST(BlocksAreFreedInTheOrderOfAllocation) {
  Arena arena;
  arena.Grow(4096);
  std::byte* a = arena.Take(2048);
  std::byte* b = arena.Take(2048);
  arena.Give(b);
  CHECK(arena.Take(1) == nullptr);  // a is older and still taken
  arena.Give(b);                    // not taken any more
  arena.Give(nullptr);
  CHECK(arena.Take(1) == nullptr);
  arena.Give(a);
  CHECK(arena.Take(4096) == a);
}

TEST(AnArenaGrowsOnlyWhileItIsEmpty) {
  Arena arena;
  arena.Grow(4096);
  std::byte* a = arena.Take(64);
  arena.Grow(1 << 20);
  CHECK_EQ(arena.size(), 4096u);
  std::memset(a, 1, 64);
  arena.Give(a);
  arena.Grow(1 << 20);
  CHECK_EQ(arena.size(), 1u << 20);
  arena.Grow(4096);  // never shrinks
  CHECK_EQ(arena.size(), 1u << 20);
  CHECK(arena.Take(0) == nullptr);
}

// Buckets of random sizes in a window: `room` bytes in flight, of which the arena has
// `in_flight`. Every rank must get the sum of every bucket.
void Train(uint64_t room, uint64_t in_flight) {
  World world({0, 0, 0});
  world.Each([&](Communicator& c) {
    Overlap overlap(world.ranks[c.rank()]);
    std::mt19937 random(7);
    std::uniform_int_distribution<size_t> sizes(0, 3000);
    for (int step = 0; step < 20; ++step) {
      std::vector<std::vector<float>> buckets;
      std::deque<size_t> started;
      uint64_t held = 0;
      auto collect = [&] {
        const size_t k = started.front();
        started.pop_front();
        held -= (buckets[k].size() * 4 + 63) / 64 * 64;
        CHECK(overlap.Done(AllreduceOf(&buckets[k]), static_cast<int64_t>(k)).ok());
        for (float x : buckets[k]) CHECK_EQ(x, 3.0f * static_cast<float>(k + 1));
      };
      overlap.Begin(0);
      for (size_t k = 0; k < 12; ++k) {
        buckets.emplace_back(sizes(random), static_cast<float>(k + 1));
        const uint64_t need = (buckets[k].size() * 4 + 63) / 64 * 64;
        while (held + need > room) collect();
        const Call call = AllreduceOf(&buckets[k]);
        CHECK(overlap.Start(call, static_cast<int64_t>(k), in_flight).ok());
        std::fill(buckets[k].begin(), buckets[k].end(), -1.0f);  // START has copied it
        held += need;
        started.push_back(k);
      }
      while (!started.empty()) collect();
    }
  });
}

TEST(BucketsWrapAroundInTheArena) { Train(20000, 20000); }

TEST(BucketsBeyondTheArenaUseTemporaryMemory) { Train(30000, 4096); }

// Begins a training step while another thread still copies results of the last one,
// whose memory must not be freed before. Returns false if that thread was faster.
bool BeginWhileItIsCopied(std::vector<float>* in) {
  World world({0});
  Overlap overlap(world.ranks[0]);
  std::vector<float> out(in->size(), -1.0f);
  CHECK(overlap.Start(AllreduceOf(in), 0, in->size() * sizeof(float)).ok());
  std::thread copier([&] {
    Call call = AllreduceOf(in);
    call.tensors[0].out = out.data();
    CHECK(overlap.Done(call, 0).ok());
  });
  // exposed() changes under the lock under which the copy is announced.
  while (overlap.exposed() == 0) std::this_thread::yield();
  overlap.Begin(0);
  CHECK_EQ(out.back(), 1.0f);
  copier.join();
  return world.ranks[0]->aborted();
}

TEST(NoBlockIsFreedWhileItIsCopied) {
  std::vector<float> in(size_t{1} << 24, 1.0f);
  bool came = false;
  for (int tries = 0; tries < 100 && !came; ++tries) came = BeginWhileItIsCopied(&in);
  CHECK(came);
}

}  // namespace
}  // namespace ringjax
