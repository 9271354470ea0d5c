// Ranks that die at any moment while buckets are in flight. All buckets of a training
// step contain the values of one set of ranks, and all ranks have equal results.
#include <map>
#include <random>

#include "engine/communicator/overlap.h"
#include "epochs.h"

namespace ringjax::testing_epochs {
namespace {

#ifdef RINGJAX_SANITIZED
constexpr int kSeeds = 5;
#else
constexpr int kSeeds = 24;
#endif
constexpr int kSteps = 8, kBuckets = 5;

class Training {
 public:
  Training(int size, size_t tile, unsigned seed)
      : seed_(seed), job_(size, tile), random_(seed) {
    for (int w = 0; w < size; ++w)
      overlaps_.push_back(std::make_unique<Overlap>(job_.worker(w).communicator));
    sums_.resize(static_cast<size_t>(size));
    started_ = std::vector<std::atomic<int>>(static_cast<size_t>(size));
    Remember();
  }

  void Run(int kills) {
    std::vector<std::thread> threads;
    for (size_t w = 0; w < overlaps_.size(); ++w)
      threads.emplace_back([this, w] { Work(w); });
    for (int k = 0; k < kills; ++k) {
      const int bucket = Upto(kSteps * kBuckets);
      Worker* const watched = job_.members()[Index()];
      while (started_[static_cast<size_t>(watched->number)] < bucket + 1)
        std::this_thread::yield();
      Pause(Upto(300));
      Worker* const victim = job_.members()[Index()];
      job_.Kill(victim);
      if (Upto(2) == 0) Pause(Upto(2000));
      job_.Revoke();
      job_.Join();
      Remember();
      for (Worker* w : job_.members()) {
        Pause(Upto(100));
        job_.Install(w);
        overlaps_[static_cast<size_t>(w->number)]->Follow(w->communicator);
      }
    }
    for (auto& t : threads) t.join();
    Check();
  }

 private:
  int Upto(int n) { return static_cast<int>(random_() % static_cast<unsigned>(n)); }
  size_t Index() {
    return static_cast<size_t>(Upto(static_cast<int>(job_.members().size())));
  }
  void Remember() {
    float sum = 0;
    for (int w : job_.numbers()) sum += Part(w);
    possible_.push_back(sum);
  }

  void Work(size_t me) {
    Overlap& overlap = *overlaps_[me];
    std::mt19937 random(seed_ * 100 + static_cast<unsigned>(me));
    for (int step = 0; step < kSteps; ++step) {
      std::vector<std::vector<float>> in, out;
      std::vector<Call> calls;
      overlap.Begin(0);
      for (int k = 0; k < kBuckets; ++k) {
        std::mt19937 sizes(seed_ * 1000 + static_cast<unsigned>(step * kBuckets + k));
        const size_t n = (size_t{1} << (1 + sizes() % 15)) + sizes() % 3;
        in.emplace_back(n, Part(static_cast<int>(me)));
        out.emplace_back(n, -1.0f);
        calls.push_back(AllreduceOf(&in.back()));
        CHECK(overlap.Start(calls.back(), k, 1 << 19).ok());
        std::fill(in.back().begin(), in.back().end(), -2.0f);  // START has copied it
        ++started_[me];
        Pause(static_cast<int>(random() % 100));
      }
      bool ok = true;
      float sum = -3;
      for (int k = 0; k < kBuckets; ++k) {
        const auto at = static_cast<size_t>(k);
        calls[at].tensors[0].out = out[at].data();
        if (!overlap.Done(calls[at], k).ok()) {
          ok = false;
          continue;
        }
        if (sum == -3) sum = out[at][0];
        if (ok)
          for (float x : out[at]) CHECK_EQ(x, sum);
      }
      if (!ok) break;  // this worker was killed
      sums_[me].push_back(sum);
    }
    started_[me] = kSteps * kBuckets + 1;
  }

  void Check() {
    const std::vector<int> left = job_.numbers();
    const auto& want = sums_[static_cast<size_t>(left[0])];
    CHECK_EQ(want.size(), static_cast<size_t>(kSteps));
    for (int w : left) CHECK(sums_[static_cast<size_t>(w)] == want);
    for (const auto& sums : sums_)  // including steps of dead workers
      for (size_t step = 0; step + 1 < sums.size(); ++step)
        CHECK_EQ(sums[step], want[step]);
    for (size_t step = 0; step < want.size(); ++step) {
      CHECK(std::find(possible_.begin(), possible_.end(), want[step]) !=
            possible_.end());
      CHECK(step == 0 || want[step] <= want[step - 1]);
    }
  }

  const unsigned seed_;
  Job job_;
  std::mt19937 random_;
  std::vector<std::unique_ptr<Overlap>> overlaps_;  // by worker
  std::vector<std::vector<float>> sums_;            // by worker and step
  std::vector<std::atomic<int>> started_;           // by worker: buckets
  std::vector<float> possible_;                     // by epoch
};

void ManySeeds(int size, size_t tile, int kills) {
  for (int seed = 0; seed < kSeeds; ++seed) {
    const int before = testing::failures;
    Training(size, tile, static_cast<unsigned>(seed * 10 + size)).Run(kills);
    if (testing::failures != before)
      testing::Fail(__FILE__, __LINE__,
                    "size " + std::to_string(size) + ", seed " + std::to_string(seed));
  }
}

TEST(AStepHasOneMembershipOverLinks) {
  ManySeeds(2, 0, 1);
  ManySeeds(3, 0, 1);
}
TEST(AStepHasOneMembershipInASegment) { ManySeeds(3, 65536, 1); }
TEST(AStepHasOneMembershipThoughTwoDie) {
  ManySeeds(4, 0, 2);
  ManySeeds(5, 65536, 3);
}

TEST(AStepThatFailedEverywhereIsForgotten) {
  Job job(2, 0);
  std::vector<std::unique_ptr<Overlap>> overlaps;
  for (int w = 0; w < 2; ++w)
    overlaps.push_back(std::make_unique<Overlap>(job.worker(w).communicator));
  std::vector<std::thread> ranks;
  for (size_t w = 0; w < 2; ++w)
    ranks.emplace_back([&, w] {
      std::vector<float> data(4, 1.0f), other(5 + w, 1.0f);
      CHECK(overlaps[w]->Start(AllreduceOf(&other), 0, 256).ok());  // shapes differ
      CHECK(overlaps[w]->Start(AllreduceOf(&data), 1, 256).ok());
      CHECK(overlaps[w]->Done(AllreduceOf(&other), 0).code() == Code::kMismatch);
      overlaps[w]->Begin(0);  // bucket 1 was never collected
      CHECK(overlaps[w]->Start(AllreduceOf(&data), 0, 256).ok());
      CHECK(overlaps[w]->Done(AllreduceOf(&data), 0).ok());
      CHECK_EQ(data[0], 2.0f);
    });
  for (auto& t : ranks) t.join();
}

}  // namespace
}  // namespace ringjax::testing_epochs
