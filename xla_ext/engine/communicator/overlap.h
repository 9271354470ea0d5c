// Overlap: runs allreduces of buckets on an engine thread while the program computes.
//
// START copies the tensors into memory of the engine and returns; DONE waits for the
// results and copies them out. The copies are necessary: if another part of a compiled
// program fails between START and DONE, XLA skips DONE and frees the program's buffers
// while bytes are still moving. The size of the overlap window is fixed when a program
// is compiled; the engine keeps that memory and reuses it in every training step.
//
// In an elastic job, all buckets of a chain in one training step must be averaged over
// the same ranks. So the engine keeps the inputs in addition to the results, runs
// earlier buckets again if a later one completes in another epoch, and DONE waits until
// all buckets of the chain are complete. All STARTs of a chain must therefore come
// before its first DONE.
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

// A `site` is the number of a chain and, in the low 16 bits, of a bucket in it. A
// program may have several chains.
inline int64_t ChainOf(int64_t site) { return site >> 16; }
inline int64_t BucketOf(int64_t site) { return site & 0xffff; }

// Thread-safe; START and DONE of one site must come one after the other.
class Overlap {
 public:
  static constexpr uint64_t kAlign = 64;  // bytes, for tensors in the engine's memory

  explicit Overlap(std::shared_ptr<Communicator> communicator);
  ~Overlap();

  // Uses `next`, the next epoch of the same ResilientComm, for all later jobs.
  void Follow(std::shared_ptr<Communicator> next);

  // Begins a training step of the chain of `site`. If DONE has not collected a bucket
  // of the step before, that step failed half way on this rank only, and the
  // communicator is aborted. If instead a call of that step has failed on all ranks of
  // an elastic job, waits for the step to end and drops it.
  void Begin(int64_t site);

  // Copies the tensors of `call`, an allreduce, and queues it under the number `site`.
  // `in_flight`: the most bytes, each tensor rounded up to kAlign, that the chain has
  // between START and DONE. A bucket beyond that gets memory of its own until its DONE.
  // Aborts the communicator if `site` is under way already.
  Status Start(const Call& call, int64_t site, uint64_t in_flight);

  // Waits for the results of `site` and copies them to the tensors' `out`.
  // kFailedPrecondition if there was no START.
  Status Done(const Call& call, int64_t site);

  // Seconds that callers of Done have waited so far: communication that was not hidden.
  double exposed() const;

 private:
  // One bucket between its START and its DONE. This struct has nothing to do with the
  // job that ringrun starts, which comments call an elastic or a static job.
  struct Job {
    Call call;                            // its tensors lie in `block` or `beyond`
    std::string name, names, partition;   // the texts of `call`
    std::byte* block = nullptr;           // memory in the arena, or null
    std::unique_ptr<std::byte[]> beyond;  // memory if the arena had no room, or null
    // Buckets with equal units must complete in one epoch. If the ranks can change, the
    // unit is the number of the chain. Otherwise each bucket has its own unit, which is
    // negative.
    int64_t unit = 0;
    uint64_t ticket = 0;
    uint32_t epoch = 0;  // the epoch in which the call completed
    // Guarded by mutex_. pending: started and not collected; finished: served by the
    // engine thread; copied: a thread copies it in or out now, without the lock.
    bool pending = false, finished = false, copied = false;
    Status status;
  };

  void Work();
  void RunNext(std::unique_lock<std::mutex>* lock);
  // Whether the results of `job` are final: all started buckets of its unit have
  // finished.
  bool Ready(const Job& job) const;
  Status Wait(Job* job, std::unique_lock<std::mutex>* lock);
  // Aborts the communicator and drops all jobs if `stale` selects a job under way.
  template <typename Stale>
  void GiveUpIf(Stale&& stale, std::unique_lock<std::mutex>* lock);
  // Waits until no thread uses the jobs that `old` selects, and releases their memory.
  template <typename Old>
  void Settle(Old&& old, std::unique_lock<std::mutex>* lock);
  // Makes `job` from `call`: the same call, with tensors in memory of the engine.
  void Describe(const Call& call, int64_t site, uint64_t in_flight, Job* job);
  void Release(Job* job);
  Status Unfit(const Call& call, int64_t site) const;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::shared_ptr<Communicator> communicator_;
  std::set<int64_t> failed_;  // units of which a bucket has failed on all ranks
  double exposed_ = 0;
  Arena arena_;
  std::map<int64_t, std::unique_ptr<Job>> jobs_;  // buckets by site
  std::deque<Job*> queue_;
  bool stopping_ = false;
  std::thread worker_;  // started with the first job
};

}  // namespace ringjax
