// Ranks that die at any moment of a stream of calls. The others end with equal results,
// in each of which the ranks of one epoch took part, and no call hangs.
#include <mutex>
#include <random>
#include <set>

#include "epochs.h"

namespace ringjax::testing_epochs {
namespace {

#ifdef RINGJAX_SANITIZED
constexpr int kSeeds = 6, kLargest = 16;
#else
constexpr int kSeeds = 24, kLargest = 20;
#endif

struct Outcome {
  bool ok = false;
  uint32_t epoch = 0;
  float sum = 0;  // 0 if the elements are not all equal
  std::string error;
};

struct Plan {
  int size, calls;
  size_t tile;
  unsigned seed;
  int group = 1;

  float PartOf(int worker) const { return Part(worker / group); }
};

// Returns the number of elements of call i: 8 bytes to 4 MiB, rarely many.
size_t ElementsOf(unsigned seed, int i) {
  std::mt19937 random(seed * 1000 + static_cast<unsigned>(i));
  const int bits = 1 + static_cast<int>(random() % static_cast<unsigned>(kLargest));
  return (size_t{1} << bits) + random() % 5;
}

class Stream {
 public:
  explicit Stream(const Plan& plan)
      : plan_(plan),
        job_(plan.size, plan.tile, 30, 20, plan.group),
        random_(plan.seed) {
    const auto size = static_cast<size_t>(plan.size);
    results_.resize(size);
    begun_ = std::vector<std::atomic<int>>(size);
    memberships_.push_back(job_.numbers());
  }

  void Run(int kills, bool while_forming) {
    std::vector<std::thread> threads;
    for (int w = 0; w < plan_.size; ++w)
      threads.emplace_back(
          [this, w, first = job_.worker(w).communicator] { Work(w, *first); });
    for (int k = 0; k < kills; ++k) {
      const int call = Upto(plan_.calls);
      Worker* const watched = job_.members()[Index()];
      while (begun_[static_cast<size_t>(watched->number)] < call + 1)
        std::this_thread::yield();
      Pause(Upto(400));
      job_.Kill(job_.members()[Index()]);
      if (Upto(2) == 0) Pause(Upto(3000));  // the others detect the loss
      job_.Revoke();
      job_.Join();
      if (while_forming && k == 0) LoseAnotherOne();
      for (Worker* w : job_.members()) {
        Pause(Upto(100));
        job_.Install(w);
      }
      memberships_.push_back(job_.numbers());
    }
    for (auto& t : threads) t.join();
    Check();
  }

 private:
  int Upto(int n) { return static_cast<int>(random_() % static_cast<unsigned>(n)); }
  size_t Index() {
    return static_cast<size_t>(Upto(static_cast<int>(job_.members().size())));
  }

  // Loses another worker after some workers have installed the next epoch.
  void LoseAnotherOne() {
    memberships_.push_back(job_.numbers());
    Worker* const victim = job_.members()[Index()];
    for (Worker* w : job_.members()) {
      if (w != victim && Upto(2) == 0) job_.Install(w);
      Pause(Upto(200));
    }
    job_.Kill(victim);
    job_.Revoke();
    job_.Join();
  }

  // Makes all calls on the communicator of the first epoch, as programs do.
  void Work(int number, Communicator& first) {
    const auto me = static_cast<size_t>(number);
    for (int i = 0; i < plan_.calls; ++i) {
      const size_t n = ElementsOf(plan_.seed, i);
      std::vector<float> in(n, plan_.PartOf(number)), out(n, -1.0f);
      Call call = AllreduceOf(&in);
      call.tensors[0].out = out.data();
      Outcome outcome;
      ++begun_[me];
      const Status status = first.Run(call, &outcome.epoch);
      outcome.ok = status.ok();
      outcome.error = status.message();
      if (outcome.ok &&
          std::count(out.begin(), out.end(), out[0]) == static_cast<std::ptrdiff_t>(n))
        outcome.sum = out[0];
      for (float x : in)
        if (x != plan_.PartOf(number)) CHECK(!"an input has changed");
      results_[me].push_back(outcome);
      if (!outcome.ok) break;
    }
    begun_[me] = plan_.calls + 1;
  }

  void Check() {
    const std::vector<int> left = job_.numbers();
    const auto& want = results_[static_cast<size_t>(left[0])];
    for (int number : left)
      CHECK_EQ(results_[static_cast<size_t>(number)].size(),
               static_cast<size_t>(plan_.calls));
    for (int w = 0; w < plan_.size; ++w) {
      const auto& results = results_[static_cast<size_t>(w)];
      const bool lives = std::find(left.begin(), left.end(), w) != left.end();
      for (size_t i = 0; i < results.size(); ++i) {
        const Outcome& o = results[i];
        if (!o.ok) {  // only the last call of a killed worker may fail
          if (!Contains(o.error, "killed") && !Contains(o.error, "is gone"))
            testing::Fail(__FILE__, __LINE__, o.error);
          continue;
        }
        // A dead worker's last result may come from a call that no other rank finished.
        if (!lives && (i + 1 == results.size() || !results[i + 1].ok)) continue;
        CHECK_EQ(o.sum, want[i].sum);
        CHECK_EQ(o.epoch, want[i].epoch);
        float sum = 0;
        for (int worker : memberships_[o.epoch])
          if (worker % plan_.group == 0) sum += plan_.PartOf(worker);
        CHECK_EQ(o.sum, sum);
      }
    }
    for (int number : left)
      for (const Outcome& o : results_[static_cast<size_t>(number)]) CHECK(o.ok);
  }

  const Plan plan_;
  Job job_;
  std::mt19937 random_;
  std::vector<std::vector<Outcome>> results_;  // by worker
  std::vector<std::atomic<int>> begun_;        // by worker: calls
  std::vector<std::vector<int>> memberships_;  // by epoch
};

void ManySeeds(int size, size_t tile, int kills, bool while_forming = false,
               int group = 1) {
  for (int seed = 0; seed < kSeeds; ++seed) {
    const int before = testing::failures;
    Stream({size, 12, tile, static_cast<unsigned>(seed * 10 + size), group})
        .Run(kills, while_forming);
    if (testing::failures != before)
      testing::Fail(__FILE__, __LINE__,
                    "size " + std::to_string(size) + ", seed " + std::to_string(seed));
  }
}

TEST(OneOfTwoDiesAnywhere) {
  ManySeeds(2, 4096, 1);
  ManySeeds(2, 0, 1);
}
TEST(OneOfThreeDiesAnywhereInASegment) {
  ManySeeds(3, 4096, 1);
  ManySeeds(3, size_t{1} << 20, 1);
}
TEST(OneOfThreeDiesAnywhereOverLinks) { ManySeeds(3, 0, 1); }
TEST(TwoOfFourDieAnywhereInASegment) { ManySeeds(4, 65536, 2); }
TEST(TwoOfFourDieAnywhereOverLinks) { ManySeeds(4, 0, 2); }
TEST(ThreeOfFiveDieAnywhere) {
  ManySeeds(5, 65536, 3);
  ManySeeds(5, 0, 3);
}
TEST(AnotherOneDiesWhileTheNextEpochForms) {
  ManySeeds(4, 65536, 1, true);
  ManySeeds(5, 0, 2, true);
}
// In a step, the communicators of all places have the members of one epoch.
TEST(GroupsDieAnywhere) {
  ManySeeds(6, 65536, 1, false, 2);
  ManySeeds(6, 0, 2, false, 2);
  ManySeeds(6, 4096, 1, false, 3);
  ManySeeds(8, 0, 2, true, 2);
}

}  // namespace
}  // namespace ringjax::testing_epochs
