// Overlap: runs allreduces of buckets on an engine thread while the program computes.
//
// A chain is the buckets of one gradient allreduce. Each bucket has two custom calls:
// START copies the tensors into memory of the engine and returns. DONE waits for the
// results and copies them out. The copies are necessary, because XLA skips DONE and
// frees the program's buffers, while bytes are still moving, if another part of a
// compiled program fails between START and DONE. The number of bytes between START and
// DONE is fixed when a program is compiled. The engine keeps that much memory for all
// training steps.
//
// In an elastic job, all buckets of a chain in one training step must be averaged over
// the same ranks. So the engine keeps the inputs in addition to the results, and runs
// earlier buckets again if a later bucket completes in another epoch. DONE waits until
// all buckets of the chain are complete. Therefore all STARTs of a chain must come
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

// A `site` identifies a bucket: its low 16 bits are the index of the bucket in a chain,
// and the other bits are the id of the chain. A program may have several chains.
inline int64_t ChainOf(int64_t site) { return site >> 16; }
inline int64_t BucketOf(int64_t site) { return site & 0xffff; }

// Thread-safe, except that START and DONE of one site must not run at the same time.
class Overlap {
 public:
  static constexpr uint64_t kAlign = 64;  // bytes, for tensors in the engine's memory

  explicit Overlap(std::shared_ptr<Communicator> communicator);
  ~Overlap();

  // Uses `next`, the next epoch of the same ResilientComm, for all later calls.
  void Follow(std::shared_ptr<Communicator> next);

  // Begins a training step of the chain of `site`. If DONE has not collected a bucket
  // of the previous step, the program has failed between START and DONE on this rank
  // only, and Begin aborts the communicator. But if a call of the previous step has
  // failed on all ranks of an elastic job, Begin waits for the calls of that step to
  // end and drops their results.
  void Begin(int64_t site);

  // Copies the tensors of `call`, an allreduce, and queues the call under `site`.
  // `in_flight` is the largest number of bytes, with each tensor rounded up to kAlign,
  // that the chain has between START and DONE. A bucket that does not fit gets memory
  // of its own until its DONE. Aborts the communicator if `site` has had a START
  // without a DONE.
  Status Start(const Call& call, int64_t site, uint64_t in_flight);

  // Waits for the results of `site` and copies them to the tensors' `out`. Fails with
  // kFailedPrecondition if there was no START.
  Status Done(const Call& call, int64_t site);

  // Returns how many seconds callers of Done have waited in all: the communication time
  // that no computation has hidden.
  double exposed() const;

 private:
  // One bucket between START and DONE. (Not the "elastic job" of other comments, which
  // means the ranks that ringrun has started.)
  struct Job {
    Call call;                            // its tensors lie in `block` or `beyond`
    std::string name, names, partition;   // the texts of `call`
    std::byte* block = nullptr;           // memory in the arena, or null
    std::unique_ptr<std::byte[]> beyond;  // memory if the arena had no room, or null
    // Buckets with equal units must complete in one epoch. If the ranks can change, the
    // unit is the id of the chain. Otherwise each bucket has its own unit, which is
    // negative.
    int64_t unit = 0;
    uint64_t ticket = 0;
    uint32_t epoch = 0;  // the epoch in which the call completed
    // Guarded by mutex_:
    bool pending = false;   // START has queued the bucket, DONE has not collected it
    bool finished = false;  // the engine thread has run the call
    bool copied = false;    // a thread copies the tensors now, without the lock
    Status status;
  };

  void RunQueue();
  void RunNext(std::unique_lock<std::mutex>* lock);
  // Returns whether the results of `job` are final, because all started buckets of its
  // unit have finished.
  bool IsFinal(const Job& job) const;
  Status Wait(Job* job, std::unique_lock<std::mutex>* lock);
  // Aborts the communicator and drops all jobs if `stale` selects a job in progress.
  template <typename Stale>
  void AbortIf(Stale&& stale, std::unique_lock<std::mutex>* lock);
  // Waits until no thread uses the jobs that `old` selects, and releases their memory.
  template <typename Old>
  void ReleaseWhenDone(Old&& old, std::unique_lock<std::mutex>* lock);
  // Copies `call` to `job->call`, with tensors in memory of the engine.
  void SetJob(const Call& call, int64_t site, uint64_t in_flight, Job* job);
  void Release(Job* job);
  Status SizeError(const Call& call, int64_t site) const;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::shared_ptr<Communicator> communicator_;
  std::set<int64_t> failed_;  // units with a bucket that has failed on all ranks
  double exposed_ = 0;
  Arena arena_;
  std::map<int64_t, std::unique_ptr<Job>> jobs_;  // buckets by site
  std::deque<Job*> queue_;
  bool stopping_ = false;
  std::thread worker_;  // started with the first job
};

}  // namespace ringjax
