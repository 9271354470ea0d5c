// A job of threads that loses ranks: workers, each with a resilient communicator, and
// the rules by which a coordinator forms the epochs.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "engine/communicator/resilient_comm.h"
#include "local_world.h"

namespace ringjax::testing_epochs {

// Returns a worker's summand, so that a sum shows which workers took part.
inline float Part(int worker) { return static_cast<float>(1 << worker); }

struct Worker {
  int number = 0;
  std::shared_ptr<ResilientComm> resilient;
  std::shared_ptr<Communicator> communicator;  // for the newest epoch
  std::shared_ptr<Communicator> ending;        // only in a job of groups
  bool installed = false;                      // whether `communicator` is in use
};

// Derives the commit decision from the progress reports of all ranks.
inline CommitDecision Decide(const std::vector<ProgressReport>& all) {
  CommitDecision decision;
  uint64_t done = all[0].done;
  for (const ProgressReport& s : all) {
    decision.finished = std::max(decision.finished, s.returned);
    done = std::min(done, s.done);
    decision.repeats &= s.repeatable;
  }
  decision.finished = std::max(decision.finished, done);
  return decision;
}

class Job {
 public:
  // With groups, a communicator connects the workers of one place, worker % group, and
  // groups are lost as a whole.
  Job(int size, size_t tile, double epoch_timeout = 30, double timeout = 20,
      int group = 1)
      : tile_(tile), timeout_(timeout), group_(group) {
    for (int w = 0; w < size; ++w) {
      auto worker = std::make_unique<Worker>();
      worker->number = w;
      worker->resilient = std::make_shared<ResilientComm>(epoch_timeout);
      all_.push_back(std::move(worker));
      members_.push_back(all_.back().get());
    }
    Join();
    for (Worker* w : members_) Install(w);
  }

  Worker& worker(int number) { return *all_[static_cast<size_t>(number)]; }
  const std::vector<Worker*>& members() const { return members_; }
  std::vector<int> numbers() const {
    std::vector<int> numbers;
    for (const Worker* w : members_) numbers.push_back(w->number);
    return numbers;
  }

  // Acts as if the process had died: the worker stops and its links close.
  void Kill(Worker* victim) {
    lost_ = victim->number;
    const Status killed(Code::kUnavailable, "killed", lost_);
    for (const auto& worker : all_) {
      const auto found = std::find(members_.begin(), members_.end(), worker.get());
      if (worker->number / group_ != lost_ / group_ || found == members_.end())
        continue;
      worker->resilient->End(killed);
      for (auto* c : {&worker->communicator, &worker->ending}) {
        if (*c) (*c)->Abort(killed);
        c->reset();
      }
      members_.erase(found);
    }
  }

  // Acts as if the process had been frozen: the others continue, and the worker does
  // not know that it is fenced.
  void Fence(Worker* victim) {
    std::erase(members_, victim);
    lost_ = victim->number;
  }

  // All workers stop and report their progress. The next Install applies the decision.
  void Revoke() {
    const Status gone(Code::kUnavailable, "rank " + std::to_string(lost_) + " is gone");
    for (Worker* w : members_) {
      w->communicator->Abort(gone);
      if (w->ending) w->ending->Abort(gone);
    }
    std::vector<ProgressReport> standings;
    for (Worker* w : members_) {
      ProgressReport& standing = standings.emplace_back();
      if (w->installed) CHECK(w->communicator->Quiesce(20, &standing).ok());
    }
    const CommitDecision decision = Decide(standings);
    for (Worker* w : members_) {
      // A rank also counts an epoch in which it was never connected.
      if (!w->installed && pending_) CHECK(w->resilient->Install(nullptr, last_).ok());
      w->installed = false;
    }
    last_ = decision;
    last_.ranks.assign(joined_.size(), -1);
    for (size_t old = 0; old < joined_.size(); ++old)
      for (size_t now = 0; now < members_.size(); ++now)
        if (members_[now]->number == joined_[old])
          last_.ranks[old] = static_cast<int>(now);
    pending_ = true;
  }

  // Connects the remaining workers. Their links are not used before Install.
  void Join() {
    CommunicatorOptions o;
    o.epoch = epoch_++;
    o.collective_timeout = timeout_;
    if (group_ > 1) {
      const auto wide = JoinRanks(std::vector<int>(members_.size(), 0), o, 4096, tile_);
      for (size_t i = 0; i < members_.size(); ++i) members_[i]->ending = wide[i];
    }
    for (int place = 0; place < group_; ++place) {
      std::vector<Worker*> peers;
      for (Worker* w : members_)
        if (w->number % group_ == place) peers.push_back(w);
      ResilientComms resilient;
      std::vector<std::shared_ptr<Communicator>> ending;
      for (Worker* w : peers) {
        resilient.push_back(w->resilient);
        ending.push_back(w->ending);
      }
      const auto made = JoinRanks(std::vector<int>(peers.size(), 0), o, 4096, tile_,
                                  resilient, ending);
      for (size_t i = 0; i < peers.size(); ++i) {
        peers[i]->communicator = made[i];
        peers[i]->installed = false;
      }
    }
    joined_ = numbers();
  }

  void Install(Worker* w) {
    CHECK(w->resilient->Install(w->communicator, last_).ok());
    w->installed = true;
  }

  void Continue() {
    Revoke();
    Join();
    for (Worker* w : members_) Install(w);
  }

  uint32_t epoch() const { return epoch_ - 1; }
  CommitDecision& decision() { return last_; }

 private:
  const size_t tile_;
  const double timeout_;
  const int group_;
  uint32_t epoch_ = 0;
  int lost_ = -1;
  bool pending_ = false;
  CommitDecision last_;      // about the previous epoch
  std::vector<int> joined_;  // workers by rank in the last one joined
  std::vector<std::unique_ptr<Worker>> all_;
  std::vector<Worker*> members_;
};

inline void Pause(int microseconds) {
  const auto until = Clock::now() + std::chrono::microseconds(microseconds);
  while (Clock::now() < until) std::this_thread::yield();
}

inline bool Contains(const std::string& text, const std::string& part) {
  return text.find(part) != text.npos;
}

}  // namespace ringjax::testing_epochs
