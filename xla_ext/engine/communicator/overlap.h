// Overlap: allreduces that run on an engine thread while the caller computes.
//
// START packs the tensors into memory of the engine's own and returns; DONE waits and
// unpacks. Own memory is not an optimisation: if another part of a compiled program
// fails between the two, its runtime skips DONE and frees its buffers while bytes are
// still moving. How much of it a program needs at once is decided when it is compiled;
// that much is kept and reused, step after step.
//
// In a job that goes on without the ranks it loses, all that a step of a chain sends
// has one membership. So there the engine keeps the tensors beside their sums, buckets
// run again if a later one found fewer ranks, and DONE waits for the whole step; the
// program has all STARTs of a chain before its DONEs.
#pragma once

#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "engine/communicator/arena.h"
#include "engine/communicator/communicator.h"

namespace ringjax {

// Several chains may be in one program, each with buckets of its own.
inline int64_t ChainOf(int64_t site) { return site >> 16; }
inline int64_t BucketOf(int64_t site) { return site & 0xffff; }

class Overlap {
 public:
  static constexpr uint64_t kAlign = 64;  // of a tensor in the engine's memory

  explicit Overlap(std::shared_ptr<Communicator> communicator);
  ~Overlap();

  // The communicator of the next generation in the same succession.
  void Follow(std::shared_ptr<Communicator> next);

  // A step of `site`'s chain begins. Whatever a previous step of the chain started and
  // never collected means that the step failed half way on this rank only, which ends
  // the communicator; unless a call of that step has failed on all ranks alike.
  void Begin(int64_t site);

  // Queues an allreduce of `call` under the number `site`: of a chain (ChainOf) and of
  // a bucket in it. `in_flight` is the most bytes, each tensor rounded up to kAlign,
  // that its chain has between START and DONE; what goes beyond that is memory for the
  // moment.
  Status Start(const Call& call, int64_t site, uint64_t in_flight);

  // Waits for `site` and copies its results to the tensors' `out`.
  Status Done(const Call& call, int64_t site);

  // Seconds that callers of Done have waited so far: what was not hidden.
  double exposed() const;

 private:
  struct Job {
    Call call;  // tensors point into the block
    std::string name, names, partition;
    std::byte* block = nullptr;           // of the arena
    std::unique_ptr<std::byte[]> beyond;  // or, if that had no room
    int64_t chain = 0;
    uint64_t ticket = 0;
    uint32_t epoch = 0;  // where it ran
    // Guarded by mutex_: started and not collected; served by the engine thread; packed
    // or unpacked just now, without the lock.
    bool pending = false, finished = false, copied = false;
    Status status;
  };

  void Work();
  void RunNext(std::unique_lock<std::mutex>* lock);
  bool elastic() const { return communicator_->succession() != nullptr; }
  // What has to be finished before the results of `job` are.
  bool Ready(const Job& job) const;
  Status Wait(Job* job, std::unique_lock<std::mutex>* lock);
  // Ends the communicator if a job that `stale` picks is under way.
  template <typename Stale>
  void GiveUpIf(Stale&& stale, std::unique_lock<std::mutex>* lock);
  // Waits until nothing uses the memory of those that `old` picks, and gives it back.
  template <typename Old>
  void Settle(Old&& old, std::unique_lock<std::mutex>* lock);
  void Describe(const Call& call, uint64_t in_flight, Job* job);
  void Release(Job* job);
  Status Unfit(const Call& call, int64_t site) const;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::shared_ptr<Communicator> communicator_;
  std::set<int64_t> failed_;  // chains: a bucket of the step failed on all ranks
  double exposed_ = 0;
  Arena arena_;
  std::map<int64_t, std::unique_ptr<Job>> jobs_;  // by site
  std::deque<Job*> queue_;
  bool stopping_ = false;
  std::thread worker_;  // started with the first job
};

}  // namespace ringjax
