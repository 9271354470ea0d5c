// The eager lane while workers die at random moments. All surviving workers end all
// operations with one result, in which the ranks of exactly one epoch took part. The
// random numbers are seeded. Also run under sanitizers.
#include <cmath>
#include <cstring>
#include <map>
#include <mutex>
#include <numeric>
#include <random>

#include "check.h"
#include "eager_epochs.h"

namespace ringjax {
namespace {

using testing_eager::Epochs;
using testing_eager::Floats;
using testing_eager::Place;
using WorkPtr = std::shared_ptr<Work>;

// Returns a worker's summand, a power of two, so that a sum shows which workers took
// part.
float ShareOf(int worker) { return std::ldexp(1.0f, worker); }

// The results by name. The first worker's result of an operation is the reference.
class Results {
 public:
  void Add(const std::string& name, int worker, const Floats& result) {
    std::lock_guard lock(mutex_);
    const auto [found, fresh] = results_.try_emplace(name, result);
    if (found->second != result)
      testing::Fail(__FILE__, __LINE__,
                    name + " of worker " + std::to_string(worker) + " is another one");
  }

 private:
  std::mutex mutex_;
  std::map<std::string, Floats> results_;
};

// One operation of one worker, with its memory.
struct Operation {
  std::string name;
  Floats in, more, out;
  WorkPtr work;
  Collective op = Collective::kAllreduce;
  bool grouped = false;
};

class Chaos {
 public:
  Chaos(int size, unsigned seed, size_t tile)
      : job(size, OptionsFor(seed), tile, 60, AlgorithmFor(seed, tile)),
        random_(seed),
        seed_(seed) {}

  void Run() {
    std::vector<std::thread> threads;
    for (int w = 0; w < static_cast<int>(job.workers.size()); ++w)
      threads.emplace_back([this, w] { Work(w); });
    const int losses = static_cast<int>(random_() % (threads.size() - 1)) + 1;
    for (int i = 0; i < losses; ++i) {
      Pause();
      if (random_() % 4 == 0) Repair();  // as if a rank had only seemed to be lost
      Kill(&threads);
      Pause();
      job.Revoke("somebody was killed");
      // Loses another worker, before any or after some of the others have continued.
      const bool more = i + 1 < losses && random_() % 2 == 0;
      if (more && random_() % 2 == 0) Kill(&threads), ++i;
      job.Regroup();
      if (more && random_() % 2 == 0 && i + 1 < losses) {
        for (int w : job.members)
          if (random_() % 2 == 0) job.Install(w);
        Kill(&threads), ++i;
        Repair();
      } else {
        for (int w : job.members) job.Install(w);
      }
    }
    for (auto& thread : threads)
      if (thread.joinable()) thread.join();
    for (int w : job.members) CHECK_EQ(left_[w], 0);
  }

  Epochs job;

 private:
  static constexpr int kSteps = 6, kEach = 12;

  static EagerOptions OptionsFor(unsigned seed) {
    EagerOptions options;
    options.fusion_threshold = seed % 3 == 0 ? 0 : 4096 << seed % 5;
    options.cycle_seconds = seed % 4 == 0 ? 1e-4 : 0;
    return options;
  }

  // Forces algorithms that would otherwise depend on the length.
  static std::string AlgorithmFor(unsigned seed, size_t tile) {
    return tile > 0 && seed % 2 == 0 ? "allgather:direct,alltoall:pairwise" : "";
  }

  void Pause() {
    std::this_thread::sleep_for(std::chrono::microseconds(random_() % 3000));
  }

  void Repair() {
    job.Revoke("it looked as if somebody was lost");
    job.Regroup();
    for (int w : job.members) job.Install(w);
  }

  void Kill(std::vector<std::thread>* threads) {
    std::vector<int> alive;
    for (int w : job.members)
      if (!job.workers[w].lost) alive.push_back(w);
    if (alive.size() < 2) return;
    const int victim = alive[random_() % alive.size()];
    killed_[victim] = true;
    job.Kill(victim, [&] { (*threads)[victim].join(); });
  }

  // A worker that is killed stops at once. All others must reach the end.
  void Work(int worker) {
    std::mt19937 random(seed_ * 100 + worker);
    std::vector<Operation> operations(kEach);
    std::vector<int> order(kEach);
    std::iota(order.begin(), order.end(), 0);
    left_[worker] = 1;
    // Workers with higher numbers make more steps before they join.
    for (int step = 0; step < kSteps + worker % 3; ++step) {
      if ((seed_ + static_cast<unsigned>(step)) % 3 == 0) {
        // Operations one by one, by a caller that does the work of the lane.
        for (int i = 0; i < kEach; ++i) {
          Operation& o = operations[static_cast<size_t>(i)];
          if (!Submit(worker, step, i, &o, true) || !End(worker, &o)) return;
        }
        continue;
      }
      std::shuffle(order.begin(), order.end(), random);
      for (int i : order)
        if (!Submit(worker, step, i, &operations[i])) return;
      std::shuffle(order.begin(), order.end(), random);
      for (int i : order)
        if (!End(worker, &operations[i])) return;
    }
    const auto join = job.lane(worker).Join();
    if (!Fine(worker, join.status()) || !Fine(worker, join.value()->Wait())) return;
    Operation last;
    if (!Submit(worker, 1000, 0, &last) || !End(worker, &last)) return;
    left_[worker] = 0;
  }

  bool Fine(int worker, const Status& status) {
    if (status.ok()) return true;
    if (!killed_[worker])
      testing::Fail(__FILE__, __LINE__,
                    "worker " + std::to_string(worker) + ", seed " +
                        std::to_string(seed_) + ": " + status.message());
    return false;
  }

  bool Submit(int worker, int step, int i, Operation* o, bool waits = false) {
    o->name = std::to_string(step) + "." + std::to_string(i);
    o->op = Collective::kAllreduce;
    // Lengths for inline data, for some tiles, and for more than a ring holds.
    const size_t length = i % 4 == 3 ? 3000 : 1 + 7 * i;
    o->in.assign(length, ShareOf(worker));
    o->out.assign(length, -1);
    o->more.assign(5, ShareOf(worker));
    EagerRequest request = Place(o->name, &o->in, i % 2 == 0 ? &o->in : &o->out);
    o->grouped = i % 5 == 1;
    if (o->grouped) testing_eager::Add(&request, &o->more, &o->more);
    if (i % 5 == 2) {
      o->op = request.what.op = Collective::kAllgather;
      o->in.assign(static_cast<size_t>(worker + 1), ShareOf(worker));
      request = Place(o->name, &o->in, nullptr);
      request.what.op = Collective::kAllgather;
    }
    if (i == 5 || i == 10) {
      o->op = Collective::kBarrier;
      request = {};
      request.what.op = Collective::kBarrier;
      request.what.name = o->name;
    }
    request.waits = waits;
    auto work = job.lane(worker).Submit(std::move(request));
    if (!Fine(worker, work.status())) return false;
    o->work = work.value();
    return true;
  }

  bool End(int worker, Operation* o) {
    if (!Fine(worker, o->work->Wait())) return false;
    if (o->op == Collective::kBarrier) return true;
    if (o->op == Collective::kAllgather) {
      const Output& all = o->work->outputs()[0];
      Floats rows(static_cast<size_t>(all.dims[0]));
      std::memcpy(rows.data(), all.memory.get(), rows.size() * sizeof(float));
      results_.Add(o->name, worker, rows);
      // The rows of each present rank, in the order of the ranks.
      float before = -1;
      for (size_t at = 0; at < rows.size();) {
        const float share = rows[at];
        CHECK(share > before);
        before = share;
        for (int n = std::ilogb(share) + 1; n > 0; --n, ++at) CHECK_EQ(rows[at], share);
      }
      return true;
    }
    const bool in_place = o->out[0] == -1;
    const Floats& sum = in_place ? o->in : o->out;
    if (!in_place) CHECK(o->in == Floats(o->in.size(), ShareOf(worker)));
    CHECK(sum == Floats(sum.size(), sum[0]));
    // The sum has different powers of two, among them the share of this worker.
    const auto who = static_cast<unsigned>(sum[0]);
    CHECK_EQ(static_cast<float>(who), sum[0]);
    CHECK(who >> job.workers.size() == 0 && (who >> worker & 1) == 1);
    if (o->grouped) CHECK(o->more == Floats(5, sum[0]));
    results_.Add(o->name, worker, {sum[0]});
    return true;
  }

  std::mt19937 random_;
  const unsigned seed_;
  std::atomic<bool> killed_[8] = {};
  std::atomic<int> left_[8] = {};
  Results results_;
};

constexpr unsigned kSeeds = testing_eager::kSlow ? 3 : 15;

void Try(int size) {
  for (const size_t tile : {0, 4096})
    for (unsigned seed = 0; seed < kSeeds; ++seed)
      Chaos(size, seed * 11 + static_cast<unsigned>(size), tile).Run();
}

// No worker is lost, but epochs end at any moment, even while some ranks have left the
// last round that they need and others have not.
TEST(eager_chaos_of_false_alarms) {
  constexpr int kBarriers = testing_eager::kSlow ? 100 : 2000;
  for (const size_t tile : {0, 4096}) {
    Epochs job(3, {}, tile);
    std::atomic<int> left{3};
    std::vector<std::thread> threads;
    for (int w = 0; w < 3; ++w)
      threads.emplace_back([&, w] {
        for (int i = 0; i < kBarriers; ++i) {
          Floats x(1, ShareOf(w));
          EagerRequest request = Place("sum", &x, &x);
          request.waits = w > 0;
          if (i % 8 != 0) {
            request = {};
            request.what.op = Collective::kBarrier;
            request.what.name = "barrier " + std::to_string(i);
          }
          CHECK_EQ(job.lane(w).Submit(std::move(request)).value()->Wait().message(),
                   "");
          if (i % 8 == 0) CHECK_EQ(x[0], 7.0f);
        }
        CHECK_EQ(job.lane(w).Join().value()->Wait().message(), "");
        --left;
      });
    std::mt19937 random(static_cast<unsigned>(tile));
    while (left > 0) {
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
      job.Repair("it looked as if somebody was lost");
    }
    for (auto& thread : threads) thread.join();
  }
}

TEST(eager_chaos_of_2) { Try(2); }
TEST(eager_chaos_of_3) { Try(3); }
TEST(eager_chaos_of_4) { Try(4); }
TEST(eager_chaos_of_5) { Try(5); }

}  // namespace
}  // namespace ringjax
