// Who turns the lane's wheel: takes in what was submitted, begins rounds and joins
// those of others. That is the thread, or a caller that waits for its own operation. To
// wake a thread and be woken by it takes longer than most short operations, so while
// such callers come one after the other the thread stands aside and only looks now and
// then whether they still do.
#include <chrono>
#include <utility>

#include "engine/eager/lane.h"

namespace ringjax {
namespace {

// How long a caller turns before it lets the thread do so and looks for signals.
constexpr auto kLongestTurn = std::chrono::milliseconds(100);
// In a turn it is in the middle of something, so a signal ends the job, as it ends a
// call that runs on its thread. But only where nothing moves any more.
constexpr double kStill = 2;
// After so long without callers the thread listens to peers again. Nothing of this
// rank's is under way meanwhile, so nobody waits for more than its answer.
constexpr auto kPause = std::chrono::milliseconds(5);

Clock::duration Seconds(double seconds) {
  return std::chrono::duration_cast<Clock::duration>(
      std::chrono::duration<double>(seconds));
}

}  // namespace

void EagerLane::Loop(std::unique_lock<std::mutex>* wheel) {
  do {
    StandAside(wheel);
  } while (Turn(Clock::time_point::max()).ok());
}

// With the wheel: one round if there is a reason for one, else waits for that. Not ok:
// the communicator has been aborted.
Status EagerLane::Turn(Clock::time_point until) {
  if (!holds() || hurried_.exchange(false)) TakeIn();
  if (Clock::now() >= next_look_) Watch();
  if (negotiation_->HasNews()) {
    RJ_TRY(Gather());
    return Round();
  }
  bool called = false, needed;
  {
    std::lock_guard lock(mutex_);
    needed = !active_.empty() || joined_;
  }
  RJ_TRY(communicator_->Await(std::min(until, next_look_), needed, &called));
  if (!called) return OkStatus();
  TakeIn();
  return Round();
}

void EagerLane::TakeIn() {
  bool joins;
  {
    std::lock_guard lock(mutex_);
    taken_.swap(incoming_);
    joins = std::exchange(joins_, false);
    if (succession_) HoldBack(&joins);
  }
  for (const TaskPtr& task : taken_) {
    hurries_ |= task->timeout > 0;
    negotiation_->Submit(task);
  }
  taken_.clear();
  if (joins) negotiation_->Join();
}

// Waits for more to fuse with, unless a peer does not want to wait.
Status EagerLane::Gather() {
  if (options_.cycle_seconds <= 0) return OkStatus();
  const auto until = Clock::now() + Seconds(options_.cycle_seconds);
  for (bool called = false; !called && Clock::now() < until;) {
    RJ_TRY(communicator_->Await(until, true, &called));
    TakeIn();
  }
  return OkStatus();
}

// The thread, with nothing to do: leaves the wheel to callers if they come.
void EagerLane::StandAside(std::unique_lock<std::mutex>* wheel) {
  if (callers_.load(std::memory_order_relaxed) == callers_seen_) return;
  std::unique_lock lock(mutex_);
  if (!active_.empty() || joined_ || communicator_->aborted()) return;
  wheel->unlock();
  aside_ = true;
  uint64_t now;
  while (aside_ && (now = callers_.load(std::memory_order_relaxed)) != callers_seen_) {
    callers_seen_ = now;
    recalled_.wait_for(lock, kPause, [this] { return !aside_; });
  }
  aside_ = false;
  lock.unlock();
  wheel->lock();
}

// With mutex_ held: somebody must turn, and no caller will.
void EagerLane::Recall() {
  if (!std::exchange(aside_, false)) return;
  recalled_.notify_one();
}

// A caller that waits for `ticket`: turns itself until it has ended, or for a while.
// False: somebody else turns.
bool EagerLane::Drive(const Ticket& ticket) {
  if (Gate::IsDriving()) return false;  // a signal handler, in the middle of a turn
  std::unique_lock wheel(wheel_, std::try_to_lock);
  if (!wheel) return false;
  if (!cuda_) {  // that is for one thread alone
    const Gate::Driver driver(gate_.get());
    const InterruptsAfter patience(kStill);
    const auto until = Clock::now() + kLongestTurn;
    Guarded([&] {
      while (!ticket.done() && Clock::now() < until && Turn(until).ok()) continue;
    });
  }
  wheel.unlock();
  std::lock_guard lock(mutex_);
  ++stats_.driven;
  if (!active_.empty() || joined_ || communicator_->aborted()) Recall();
  return true;
}

}  // namespace ringjax
