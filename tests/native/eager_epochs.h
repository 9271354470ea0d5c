// A job of eager lanes that continues after it has lost workers: threads as workers,
// and the decisions that a coordinator would make. A worker keeps its number, and has a
// rank in each epoch.
#pragma once

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "eager_world.h"
#include "engine/communicator/resilient_comm.h"

namespace ringjax::testing_eager {

class Epochs {
 public:
  struct Worker {
    std::shared_ptr<ResilientComm> resilient;
    std::shared_ptr<Communicator> communicator;  // for the newest epoch
    std::unique_ptr<EagerLane> lane;
    std::vector<CommitDecision> heard;  // received, not installed yet
    bool lost = false;
  };

  explicit Epochs(int size, EagerOptions options = {}, size_t tile = 4096,
                  double epoch_timeout = 60, const std::string& algorithm = "")
      : options_(options),
        tile_(tile),
        epoch_timeout_(epoch_timeout),
        algorithm_(algorithm) {
    for (int w = 0; w < size; ++w) members.push_back(Add());
    Form();
    for (int w : members) Install(w);
  }

  // Adds a worker that is in no epoch yet.
  int Add() {
    workers.emplace_back().resilient = std::make_shared<ResilientComm>(epoch_timeout_);
    return static_cast<int>(workers.size()) - 1;
  }

  EagerLane& lane(int worker) { return *workers[static_cast<size_t>(worker)].lane; }

  // Acts as if the process of a worker had died: its calls end at once, and its links
  // close. `ended` returns when no thread uses the lane any more.
  template <typename Ended>
  void Kill(int worker, Ended&& ended) {
    Worker& w = workers[static_cast<size_t>(worker)];
    w.lost = true;
    w.lane->Close();
    ended();
    w.lane.reset();
    w.communicator.reset();
  }
  void Kill(int worker) {
    Kill(worker, [] {});
  }

  // Makes the actions of the survivors after a loss. They are in two halves, Revoke and
  // Regroup, so that tests can act in between.
  void Revoke(const std::string& reason) {
    for (int w : members)
      if (!workers[w].lost)
        workers[w].communicator->Abort(Status(Code::kUnavailable, reason, 0));
    decision_ = {0, true, {}, reason};
    uint64_t returned = 0, done = UINT64_MAX;
    for (int w : members) {
      if (workers[w].lost) continue;
      ProgressReport report;
      // A worker that has never installed the epoch has made no call.
      if (workers[w].communicator->epoch_index() > 0)
        CHECK(workers[w].communicator->Quiesce(20, &report).ok());
      returned = std::max(returned, report.returned);
      done = std::min(done, report.done);
      decision_.repeats = decision_.repeats && report.repeatable;
    }
    decision_.finished = std::max(returned, done);
    CHECK(decision_.repeats);
  }

  // Connects the survivors and the newcomers; Install hands out the communicators.
  void Regroup(bool repeats = true, const std::vector<int>& newcomers = {}) {
    decision_.repeats = decision_.repeats && repeats;
    std::vector<int> left;
    for (int w : members) {
      decision_.ranks.push_back(workers[w].lost ? -1 : static_cast<int>(left.size()));
      if (!workers[w].lost) left.push_back(w);
    }
    for (int w : left) workers[w].heard.push_back(decision_);
    left.insert(left.end(), newcomers.begin(), newcomers.end());
    members = left;
    Form();
  }

  void Install(int worker) {
    Worker& w = workers[static_cast<size_t>(worker)];
    if (w.heard.empty()) w.heard.emplace_back();  // a newcomer
    for (size_t i = 0; i + 1 < w.heard.size(); ++i)
      CHECK(w.resilient->Install(nullptr, w.heard[i]).ok());
    CHECK(w.resilient->Install(w.communicator, w.heard.back()).ok());
    w.heard.clear();
    if (!w.lane) w.lane = std::make_unique<EagerLane>(w.communicator, options_);
  }

  void Repair(const std::string& reason, bool repeats = true,
              const std::vector<int>& newcomers = {}) {
    Revoke(reason);
    Regroup(repeats, newcomers);
    for (int w : members) Install(w);
  }

  std::vector<Worker> workers;
  std::vector<int> members;  // workers by rank

 private:
  void Form() {
    CommunicatorOptions o;
    o.epoch = epoch_++;
    o.collective_timeout = 60;
    if (members.size() > 1) o.algorithm = algorithm_;
    ResilientComms resilient;
    for (int w : members) resilient.push_back(workers[w].resilient);
    const std::vector<int> hosts(members.size(), 0);
    const auto ranks = JoinRanks(hosts, o, 4096, tile_, resilient);
    for (size_t r = 0; r < ranks.size(); ++r)
      workers[members[r]].communicator = ranks[r];
  }

  const EagerOptions options_;
  const size_t tile_;
  const double epoch_timeout_;
  const std::string algorithm_;
  uint32_t epoch_ = 0;
  CommitDecision decision_;
};

}  // namespace ringjax::testing_eager
