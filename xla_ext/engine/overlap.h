// Overlap: allreduces that run on an engine thread while the caller computes.
//
// START packs the tensors into memory of the engine's own and returns; DONE waits and
// unpacks. Own memory is not an optimisation: if another part of a compiled program
// fails between the two, its runtime skips DONE and frees its buffers while bytes are
// still moving. Buffers are kept per site (bucket) and reused step after step.
#pragma once

#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "engine/communicator.h"

namespace ringjax {

// Several chains may be in one program, each with buckets of its own.
inline int64_t ChainOf(int64_t site) { return site >> 16; }

class Overlap {
 public:
  explicit Overlap(std::shared_ptr<Communicator> communicator);
  ~Overlap();

  // Queues an allreduce of `call` under the number `site`: of a chain (ChainOf) and of
  // a bucket in it. `first`: the first bucket of a step; whatever a previous step of
  // the chain started and never collected means that the step failed half way on this
  // rank only, which ends the communicator.
  Status Start(const Call& call, int64_t site, bool first);

  // Waits for `site` and copies its results to the tensors' `out`.
  Status Done(const Call& call, int64_t site);

 private:
  struct Job {
    Call call;  // tensors point into buffer
    std::string name, names;
    std::vector<std::byte> buffer;
    uint64_t ticket = 0;
    bool pending = false;   // started and not collected
    bool finished = false;  // guarded by mutex_
    Status status;
  };

  void Work();
  void Pack(const Call& call, Job* job);
  Status Unfit(const Call& call, int64_t site) const;

  const std::shared_ptr<Communicator> communicator_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<int64_t, std::unique_ptr<Job>> jobs_;  // by site
  std::deque<Job*> queue_;
  bool stopping_ = false;
  std::thread worker_;  // started with the first job
};

}  // namespace ringjax
