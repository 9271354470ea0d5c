// Exchanges of exact sums: results on any number of ranks, in a segment and over links,
// and the errors that their checksums find.
#include <random>

#include "base/failpoint.h"
#include "check.h"
#include "epochs.h"
#include "exact/fixed_point.h"
#include "local_world.h"

namespace ringjax {
namespace {

constexpr int kPieces = 12;

// The tensors of one rank: terms that all ranks can compute, so that the result is
// known.
struct Terms {
  Terms(int rank, std::vector<int64_t> sizes, uint64_t seed = 1) : leaves(sizes) {
    uint64_t n = 0;
    for (int64_t size : sizes) n += static_cast<uint64_t>(size);
    std::mt19937_64 random(seed * 1000 + static_cast<uint64_t>(rank));
    for (uint64_t i = 0; i < n; ++i)
      sums.push_back(static_cast<int64_t>(random()) >> 12);
    for (size_t leaf = 0; leaf < sizes.size(); ++leaf)
      units.push_back(-30 - static_cast<int>(leaf));
    units_out = units;
    control = {1 << rank, 1, -rank};
    checksum = exact::Check(sums.data(), n, 0);
    maxima[0] = rank, maxima[1] = -rank;
    mean.assign(n, -1);
  }

  Call call() {
    Call call;
    call.op = Collective::kExchange;
    call.name = "grads";
    call.rows = {kPieces};
    call.rows.insert(call.rows.end(), leaves.begin(), leaves.end());
    const auto n = static_cast<int64_t>(sums.size());
    call.tensors.push_back(
        {DType::kU32, Dims{n, 2}, sums.data(), mean.data(), mean.size() * 4});
    call.tensors.push_back({DType::kI32, Dims{3}, control.data(), control_out, 12});
    call.tensors.push_back({DType::kI32, Dims{2}, maxima, maxima_out, 8});
    call.tensors.push_back({DType::kI32, Dims{static_cast<int64_t>(units.size())},
                            units.data(), units_out.data(), units.size() * 4});
    call.tensors.push_back({DType::kU32, Dims{4}, &checksum, &total, 16});
    return call;
  }

  std::vector<int64_t> leaves, sums;
  std::vector<int32_t> units, units_out, control;
  int32_t control_out[3] = {}, maxima[2], maxima_out[2] = {};
  exact::Checksum checksum, total;
  std::vector<float> mean;
};

// Computes the result of an exchange of the terms of `ranks` alone.
std::vector<float> Expected(const std::vector<int>& ranks,
                            const std::vector<int64_t>& sizes, uint64_t seed = 1) {
  Terms all(ranks[0], sizes, seed);
  for (size_t r = 1; r < ranks.size(); ++r) {
    const Terms other(ranks[r], sizes, seed);
    for (size_t i = 0; i < all.sums.size(); ++i) all.sums[i] += other.sums[i];
  }
  uint64_t first = 0;
  for (size_t leaf = 0; leaf < sizes.size(); ++leaf) {
    const auto n = static_cast<size_t>(sizes[leaf]);
    exact::Decode(all.sums.data() + first, nullptr, n, first, all.units[leaf], kPieces,
                  all.mean.data() + first);
    first += n;
  }
  return all.mean;
}

std::vector<int> Ranks(int size) {
  std::vector<int> ranks(static_cast<size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

const std::vector<std::vector<int64_t>> kSizes = {
    {}, {0}, {1}, {5, 0, 3}, {16, 17, 1}, {1000, 3}, {70001, 5000}};

TEST(AnExchangeHasTheSameBitsOnAnyRanksAndLinks) {
  for (const std::vector<int>& hosts : {std::vector<int>{0},
                                        {0, 0},
                                        {0, 0, 0},
                                        {0, 0, 0, 0, 0},
                                        {0, 1},
                                        {0, 0, 1, 1},
                                        {0, 1, 2, 2, 2},
                                        {0, 0, 0, 0, 0, 0, 0}}) {
    for (const size_t tile : {size_t{0}, size_t{4096}, size_t{65536}}) {
      World world(hosts, "", 4096, 20, tile);
      const int size = static_cast<int>(hosts.size());
      for (const auto& sizes : kSizes) {
        const std::vector<float> want = Expected(Ranks(size), sizes);
        world.Each([&](Communicator& c) {
          Terms terms(c.rank(), sizes);
          const Status status = c.Run(terms.call());
          CHECK_EQ(status.message(), "");
          CHECK(terms.mean == want);
          CHECK_EQ(terms.control_out[0], (1 << size) - 1);
          CHECK_EQ(terms.control_out[1], size);
          CHECK_EQ(terms.maxima_out[0], size - 1);
          CHECK_EQ(terms.maxima_out[1], 0);
          CHECK_EQ(terms.control_out[2], -size * (size - 1) / 2);
        });
      }
    }
  }
}

TEST(TheStatisticsCountAnExchangeAndItsBytes) {
  World world({0, 1});
  world.Each([](Communicator& c) {
    Terms terms(c.rank(), {64000});
    CHECK(c.Run(terms.call()).ok());
    auto stats = c.log().stats();
    CHECK_EQ(stats.size(), size_t{1});
    const OpStats& s = stats["exchange"];
    CHECK_EQ(s.calls, uint64_t{1});
    CHECK(s.bytes >= 64000 * 8 && s.bytes < 64000 * 8 + 100);
    CHECK(s.sent_bytes >= 32000 * 12 && s.sent_bytes < 32000 * 12 + 200);
  });
}

TEST(UnitsThatDifferAreNamedBeforeAnythingMoves) {
  World world({0, 0, 0});
  world.Each([](Communicator& c) {
    Terms terms(c.rank(), {4, 40});
    if (c.rank() == 1) terms.units[1] = -7;
    const Status status = c.Run(terms.call());
    CHECK(status.code() == Code::kMismatch);
    CHECK_EQ(status.rank(), 1);
    CHECK(status.message().find("rank 1 sent leaf 1 of 40 elements, unit 2^-7, rank 0 "
                                "sent leaf 1 of 40 elements, unit 2^-31") !=
          std::string::npos);
    Terms next(c.rank(), {4, 40});
    CHECK(c.Run(next.call()).ok());
  });
}

TEST(AnExchangeWithWrongTensorsIsRefused) {
  World world({0, 0});
  world.Each([](Communicator& c) {
    Terms terms(c.rank(), {4, 40});
    Call call = terms.call();
    call.rows[2] = 41;
    CHECK(c.Run(call).message().find("do not fit sums of 44") != std::string::npos);
    call = terms.call();
    call.tensors.pop_back();
    CHECK(!c.Run(call).ok());
    call = terms.call();
    call.tensors[0].room = 8;
    CHECK(c.Run(call).message().find("has 8 bytes") != std::string::npos);
    CHECK(c.Run(terms.call()).ok());
  });
}

TEST(ARankWhoseSumsDoNotFitTheirChecksumIsNamed) {
  for (const size_t tile : {size_t{0}, size_t{4096}}) {
    for (const int bad : {0, 2}) {
      World world({0, 0, 0}, "", 4096, 20, tile);
      world.Each([&](Communicator& c) {
        Terms terms(c.rank(), {100, 40});
        if (c.rank() == bad) terms.sums[77] ^= 1 << 20;
        const Status status = c.Run(terms.call());
        CHECK(!status.ok());
        CHECK_EQ(status.rank(), bad);
        CHECK(status.message().find("rank " + std::to_string(bad) +
                                    " has sums that do not fit their checksum") !=
              std::string::npos);
      });
    }
  }
}

// The ranks are threads, so one of them passes the failpoint first.
TEST(AnErrorThatOccursOnceIsRepairedAnywhere) {
  const std::vector<std::vector<int64_t>> kLeaves = {{100, 40}, {70001, 5000}};
  for (const char* point : {"exact.sum", "exact.result"})
    for (const size_t tile : {size_t{0}, size_t{4096}, size_t{65536}})
      for (const auto& sizes : kLeaves) {
        const std::vector<float> want = Expected(Ranks(3), sizes);
        World world({0, 0, 0}, "", 4096, 20, tile);
        for (int bit = 0; bit < 1700000; bit += 311111) {
          CHECK(ArmFailpoint(point, "flip", bit, 1).ok());
          world.Each([&](Communicator& c) {
            Terms terms(c.rank(), sizes);
            CHECK_EQ(c.Run(terms.call()).message(), "");
            CHECK(terms.mean == want);
          });
        }
      }
}

// One worker's part of a job that loses workers.
struct Survivor {
  std::vector<std::vector<float>> means;
  std::vector<int32_t> members;  // a bit for each worker whose sums are in the mean
  std::string error;
};

void ExchangeMany(Communicator& first, int worker, int calls, Survivor* results) {
  for (int i = 0; i < calls; ++i) {
    Terms terms(worker, {3000, 41}, static_cast<uint64_t>(i));
    const Status status = first.Run(terms.call());
    if (!status.ok()) {
      results->error = status.message();
      return;
    }
    results->means.push_back(terms.mean);
    results->members.push_back(terms.control_out[0]);
  }
}

TEST(SurvivorsMakeTheSameExchangeAgain) {
  constexpr int kCalls = 60, kWorkers = 4;
  for (unsigned seed = 0; seed < 12; ++seed) {
    testing_epochs::Job job(kWorkers, seed % 2 ? 4096 : 0);
    std::vector<Survivor> results(kWorkers);
    std::vector<std::thread> threads;
    for (int w = 0; w < kWorkers; ++w)
      threads.emplace_back([&results, w, first = job.worker(w).communicator] {
        ExchangeMany(*first, w, kCalls, &results[static_cast<size_t>(w)]);
      });
    std::mt19937 random(seed);
    for (int kills = 0; kills < 2; ++kills) {
      testing_epochs::Pause(static_cast<int>(random() % 3000));
      job.Kill(job.members()[random() % job.members().size()]);
      job.Continue();
    }
    for (auto& thread : threads) thread.join();
    const auto numbers = job.numbers();
    const Survivor& one = results[static_cast<size_t>(numbers[0])];
    CHECK_EQ(one.means.size(), size_t{kCalls});
    for (const int w : numbers) {
      const Survivor& other = results[static_cast<size_t>(w)];
      CHECK_EQ(other.error, "");
      CHECK(other.means == one.means);
      CHECK(other.members == one.members);
    }
    for (int i = 0; i < kCalls; ++i) {
      std::vector<int> members;
      for (int w = 0; w < kWorkers; ++w)
        if (one.members[i] >> w & 1) members.push_back(w);
      CHECK(members.size() >= 2);
      CHECK(one.means[i] == Expected(members, {3000, 41}, static_cast<uint64_t>(i)));
    }
  }
}

}  // namespace
}  // namespace ringjax
