// Overlap: allreduces that run on an engine thread while the caller computes.
//
// START packs the tensors into memory of the engine's own and returns; DONE waits and
// unpacks. Own memory is not an optimisation: if another part of a compiled program
// fails between the two, its runtime skips DONE and frees its buffers while bytes are
// still moving. How much of it a program needs at once is decided when it is compiled;
// that much is kept and reused, step after step.
#pragma once

#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "engine/arena.h"
#include "engine/communicator.h"

namespace ringjax {

// Several chains may be in one program, each with buckets of its own.
inline int64_t ChainOf(int64_t site) { return site >> 16; }
inline int64_t BucketOf(int64_t site) { return site & 0xffff; }

class Overlap {
 public:
  static constexpr uint64_t kAlign = 64;  // of a tensor in the engine's memory

  explicit Overlap(std::shared_ptr<Communicator> communicator);
  ~Overlap();

  // A step of `site`'s chain begins. Whatever a previous step of the chain started and
  // never collected means that the step failed half way on this rank only, which ends
  // the communicator.
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
    std::string name, names;
    std::byte* block = nullptr;           // of the arena
    std::unique_ptr<std::byte[]> beyond;  // or, if that had no room
    uint64_t ticket = 0;
    // Guarded by mutex_: started and not collected; served by the engine thread; packed
    // or unpacked just now, without the lock.
    bool pending = false, finished = false, copied = false;
    Status status;
  };

  void Work();
  // Ends the communicator if a job that `stale` picks is under way.
  template <typename Stale>
  void GiveUpIf(Stale&& stale, std::unique_lock<std::mutex>* lock);
  void Describe(const Call& call, uint64_t in_flight, Job* job);
  void Release(Job* job);
  Status Unfit(const Call& call, int64_t site) const;

  const std::shared_ptr<Communicator> communicator_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  double exposed_ = 0;
  Arena arena_;
  std::map<int64_t, std::unique_ptr<Job>> jobs_;  // by site
  std::deque<Job*> queue_;
  bool stopping_ = false;
  std::thread worker_;  // started with the first job
};

}  // namespace ringjax
