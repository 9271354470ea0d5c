// XLA's MPI calls, with threads as processes.
#include "mpi/jax_groups.h"

#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "engine/heartbeat/wait_reports.h"
#include "local_world.h"

namespace ringjax {
namespace {

using Handle = MpiTable::Handle;

constexpr Handle kFloat = MpiTable::kDtype + 11, kByte = MpiTable::kDtype + 5;
constexpr Handle kSum = MpiTable::kOp + 1;

const MpiTable& Mpi() { return JaxMpiTable(); }

std::string ErrorText() {
  char text[MpiTable::kErrorBytes];
  int length = 0;
  CHECK_EQ(Mpi().error_string(1, text, &length), 0);
  return {text, static_cast<size_t>(length)};
}

// A group of threads, each with XLA's handle of the group.
struct Threads {
  explicit Threads(const std::vector<int>& hosts) {
    static int color = 100;  // another first device for each group
    ++color;
    CommunicatorOptions options;
    options.stall_warning = 0;
    options.name = "JAX's processes";
    options.recorder = recorder;
    collectives = JoinRanks(hosts, options, 1 << 12, 4096);
    options.id = 1;
    messages = JoinRanks(hosts, options, 1 << 12, 0);
    for (size_t r = 0; r < hosts.size(); ++r) {
      const int key = static_cast<int>(r);
      JaxGroups::Get().Expect(color, key, collectives[r], messages[r]);
      Handle handle = 0;
      CHECK_EQ(Mpi().comm_split(MpiTable::kWorld, color, key, &handle), 0);
      handles.push_back(handle);
    }
  }

  int size() const { return static_cast<int>(handles.size()); }

  void Run(const std::function<void(int rank, Handle group)>& body) const {
    std::vector<std::thread> threads;
    for (int r = 0; r < size(); ++r)
      threads.emplace_back([&, r] { body(r, handles[static_cast<size_t>(r)]); });
    for (std::thread& thread : threads) thread.join();
  }

  std::shared_ptr<Recorder> recorder = std::make_shared<Recorder>(64, "rank 0", "");
  std::vector<std::shared_ptr<Communicator>> collectives, messages;
  std::vector<Handle> handles;
};

TEST(TheTableHasTheCodesOfTheLibrary) {
  // mpi_library.cc repeats these numbers, because it includes nothing else.
  CHECK_EQ(static_cast<int>(DType::kI8), 1);
  CHECK_EQ(static_cast<int>(DType::kU8), 5);
  CHECK_EQ(static_cast<int>(DType::kF32), 11);
  CHECK_EQ(static_cast<int>(DType::kC128), 14);
  CHECK_EQ(static_cast<int>(ReduceOp::kSum), 1);
  CHECK_EQ(static_cast<int>(ReduceOp::kProduct), 5);
}

TEST(XlaReducesAndGathersInAGroup) {
  for (const std::vector<int>& hosts :
       {std::vector{0, 0}, std::vector{0, 0, 0}, std::vector{0, 0, 1, 1, 2}}) {
    const Threads threads(hosts);
    const int p = threads.size();
    threads.Run([&](int rank, Handle group) {
      int size = 0, place = -1;
      CHECK_EQ(Mpi().comm_size(group, &size), 0);
      CHECK_EQ(Mpi().comm_rank(group, &place), 0);
      CHECK_EQ(size, p);
      CHECK_EQ(place, rank);
      for (const int n : {0, 1, 5, 5000}) {
        const std::vector<float> own(static_cast<size_t>(n), 1.0f + rank);
        std::vector<float> sum(own.size()), all(own.size() * p), part(own.size());
        CHECK_EQ(Mpi().allreduce(own.data(), sum.data(), n, kFloat, kSum, group), 0);
        for (const float x : sum) CHECK_EQ(x, p * (p + 1) / 2.0f);
        CHECK_EQ(Mpi().allgather(own.data(), n, kFloat, all.data(), n, kFloat, group),
                 0);
        for (size_t i = 0; i < all.size(); ++i)
          CHECK_EQ(all[i], 1.0f + static_cast<float>(i / own.size()));
        const std::vector<int> counts(static_cast<size_t>(p), n);
        CHECK_EQ(Mpi().reduce_scatter(all.data(), part.data(), counts.data(), kFloat,
                                      kSum, group),
                 0);
        for (const float x : part) CHECK_EQ(x, p * (1.0f + rank));
      }
    });
  }
}

TEST(OnlyRanksThatSendOrReceiveTakePartInAPermutation) {
  for (const uint64_t n : {1, 1000, 300000}) {
    const Threads threads({0, 0, 1, 1});
    threads.Run([&](int rank, Handle group) {
      // Rank 3 sends nothing to nobody, 0 -> 1 -> 2, and 2 to itself is no message.
      if (rank == 3) return;
      const std::string own(n, static_cast<char>('a' + rank));
      std::string got(n, ' ');
      std::vector<Handle> requests;
      const int count = static_cast<int>(n);
      for (int repeat = 0; repeat < 3; ++repeat) {
        requests.clear();
        if (rank > 0)
          CHECK_EQ(Mpi().irecv(got.data(), count, kByte, rank - 1, 0, group,
                               &requests.emplace_back()),
                   0);
        if (rank < 2)
          CHECK_EQ(Mpi().isend(own.data(), count, kByte, rank + 1, 0, group,
                               &requests.emplace_back()),
                   0);
        for (Handle& request : requests) CHECK_EQ(Mpi().wait(&request, nullptr), 0);
        if (rank > 0) CHECK(got == std::string(n, static_cast<char>('a' + rank - 1)));
      }
    });
  }
}

TEST(XlaExchangesBlocksWithAllRanks) {
  const Threads threads({0, 0, 0, 1, 1});
  const int p = threads.size();
  threads.Run([&](int rank, Handle group) {
    const int n = 20000;
    for (int step = 1; step < p; ++step) {
      const int to = (rank + step) % p, from = (rank - step + p) % p;
      const std::vector<int32_t> own(n, rank * 10 + to);
      std::vector<int32_t> got(n);
      CHECK_EQ(Mpi().sendrecv(own.data(), n * 4, kByte, to, 0, got.data(), n * 4, kByte,
                              from, 0, group, nullptr),
               0);
      for (const int32_t x : got) CHECK_EQ(x, from * 10 + rank);
    }
  });
}

TEST(DifferentShapesAreAnErrorOnAllRanksAndTheNextCallWorks) {
  const Threads threads({0, 0, 0});
  threads.Run([&](int rank, Handle group) {
    const int n = rank == 1 ? 10 : 12;
    std::vector<float> own(12, 1), sum(12);
    CHECK(Mpi().allreduce(own.data(), sum.data(), n, kFloat, kSum, group) != 0);
    CHECK(ErrorText().find("rank 1 sent f32[10], rank 0 sent f32[12]") !=
          std::string::npos);
    CHECK_EQ(Mpi().allreduce(own.data(), sum.data(), 12, kFloat, kSum, group), 0);
    CHECK_EQ(sum[11], 3.0f);
  });
}

TEST(ASplitThatNobodyExpectsMakesAGroupThatFails) {
  Handle group = 0;
  CHECK_EQ(Mpi().comm_split(MpiTable::kWorld, 77, 3, &group), 0);
  float x = 1, y = 0;
  CHECK(Mpi().allreduce(&x, &y, 1, kFloat, kSum, group) != 0);
  CHECK(ErrorText().find("does not know which processes take part") !=
        std::string::npos);
  CHECK(Mpi().allreduce(&x, &y, 1, kFloat, kSum, 12345) != 0);
}

TEST(WhatXlaHasCutIsRefused) {
  const Threads threads({0, 0});
  const Handle group = threads.handles[0];
  float x = 1, y = 0;
  CHECK(Mpi().allreduce(&x, &y, -5, kFloat, kSum, group) != 0);
  CHECK(ErrorText().find("more than 2^31 - 1 elements") != std::string::npos);
  CHECK(Mpi().allreduce(&x, &y, 1, 5, kSum, group) != 0);
  CHECK(Mpi().allreduce(&x, &y, 1, kFloat, MpiTable::kOp + 9, group) != 0);
}

TEST(CallsOfJaxAreRecordedByItsNames) {
  const Threads threads({0, 0});
  threads.Run([&](int rank, Handle group) {
    const Handle max = MpiTable::kOp + 4;
    const int n = 4, counts[] = {n, n}, other = 1 - rank;
    std::vector<float> own(2 * n, 1), got(2 * n);
    float *in = own.data(), *out = got.data();
    CHECK_EQ(Mpi().allreduce(in, out, n, kFloat, kSum, group), 0);
    CHECK_EQ(Mpi().allreduce(in, out, n, kFloat, max, group), 0);
    CHECK_EQ(Mpi().allgather(in, n, kFloat, out, n, kFloat, group), 0);
    CHECK_EQ(Mpi().reduce_scatter(in, out, counts, kFloat, kSum, group), 0);
    CHECK_EQ(
        Mpi().sendrecv(in, 8, kByte, other, 0, out, 8, kByte, other, 0, group, nullptr),
        0);
    Handle request = 0;
    if (rank == 0)
      CHECK_EQ(Mpi().isend(in, 12, kByte, 1, 0, group, &request), 0);
    else
      CHECK_EQ(Mpi().irecv(out, 12, kByte, 0, 0, group, &request), 0);
    CHECK_EQ(Mpi().wait(&request, nullptr), 0);
  });
  std::map<std::string_view, uint64_t> bytes;
  for (const Event& event : threads.recorder->Latest()) {
    CHECK(event.lane == Lane::kJax && event.outcome == Code::kOk);
    CHECK_EQ(std::string(event.name, event.length), "JAX's processes");
    CHECK(event.entered <= event.agreed && event.agreed <= event.done);
    const bool message = event.op == "ppermute" || event.op == "all_to_all";
    CHECK_EQ(event.sequence == 0, message);
    bytes[event.op] = event.bytes;
  }
  const std::map<std::string_view, uint64_t> expected = {
      {"psum", 16},         {"pmax", 16},     {"all_gather", 32},
      {"psum_scatter", 32}, {"ppermute", 12}, {"all_to_all", 8}};
  CHECK(bytes == expected);
  CHECK_EQ(threads.recorder->count(), 12u);
  uint64_t seen = 0;
  CHECK_EQ(WaitsSince(*threads.recorder, &seen, 64).size(), 8u);  // without messages
}

TEST(AnAbortEndsAPermutation) {
  const Threads threads({0, 0});
  std::thread killer([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    threads.messages[0]->Abort(Status(Code::kUnavailable, "rank 1 was killed", 1));
  });
  char x = 0;
  Handle request = 0;
  CHECK_EQ(Mpi().irecv(&x, 1, kByte, 1, 0, threads.handles[0], &request), 0);
  CHECK(Mpi().wait(&request, nullptr) != 0);
  CHECK(ErrorText().find("rank 1 was killed") != std::string::npos);
  const Event failed = threads.recorder->Latest().back();
  CHECK(failed.op == "ppermute" && failed.outcome == Code::kUnavailable);
  CHECK(failed.done - failed.entered < std::chrono::seconds(60));
  killer.join();
}

}  // namespace
}  // namespace ringjax
