// The work of the lane, done by the holder of the progress lock: it takes in
// submissions, begins rounds and takes part in the rounds of other ranks. The holder is
// the thread of the lane, or a caller that waits for its own operation. To wake a
// thread and to be woken by it takes longer than most short operations. So while such
// callers come one after the other, the thread leaves the lock to them and only checks
// from time to time whether they still come.
#include <chrono>
#include <utility>

#include "engine/eager/lane.h"

namespace ringjax {
namespace {

// The longest time for which one caller does the work of the lane. After that the
// lane's own thread does it, and the caller looks for signals while it waits.
constexpr auto kLongestTurn = std::chrono::milliseconds(100);
// Seconds without progress after which a signal interrupts Turn. Such an interrupt
// aborts the communicator, as in a call on the caller's own thread, because Turn may be
// in the middle of a round. So it must not come while data still move.
constexpr double kStill = 2;
// After this time without callers, the lane's own thread takes part in the rounds of
// peers again. Until then a round that a peer begins waits for this rank's message.
// That delays no operation: each needs a submission of this rank, too, and none is
// pending.
constexpr auto kPause = std::chrono::milliseconds(5);

Clock::duration Seconds(double seconds) {
  return std::chrono::duration_cast<Clock::duration>(
      std::chrono::duration<double>(seconds));
}

}  // namespace

void EagerLane::Loop(std::unique_lock<std::mutex>* progress) {
  do {
    StandAside(progress);
  } while (Turn(Clock::time_point::max()).ok());
}

// Runs one round if this rank or a peer has a reason for one, else waits for a reason,
// at most until `until`. With the progress lock held. An error means that the
// communicator is aborted.
Status EagerLane::Turn(Clock::time_point until) {
  if (!holds() || hurried_.exchange(false)) TakeIn();
  if (Clock::now() >= next_look_) Watch();
  if (negotiation_->HasItems()) {
    RJ_TRY(Gather());
    return Round();
  }
  bool called = false, needed;
  {
    std::lock_guard lock(mutex_);
    needed = !active_.empty() || joined_;
  }
  RJ_TRY(
      communicator_->rounds().AwaitNext(std::min(until, next_look_), needed, &called));
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
    if (resilient_) HoldBack(&joins);
  }
  for (const TaskPtr& task : taken_) {
    hurries_ |= task->timeout > 0;
    negotiation_->Submit(task);
  }
  taken_.clear();
  if (joins) negotiation_->Join();
}

// Waits cycle_seconds for more submissions to fuse, or until a peer begins the round.
Status EagerLane::Gather() {
  if (options_.cycle_seconds <= 0) return OkStatus();
  const auto until = Clock::now() + Seconds(options_.cycle_seconds);
  for (bool called = false; !called && Clock::now() < until;) {
    RJ_TRY(communicator_->rounds().AwaitNext(until, true, &called));
    TakeIn();
  }
  return OkStatus();
}

// For the lane's own thread: if callers have come lately and no operation is pending,
// leaves the progress lock to callers until no new one comes.
void EagerLane::StandAside(std::unique_lock<std::mutex>* progress) {
  if (callers_.load(std::memory_order_relaxed) == callers_seen_) return;
  std::unique_lock lock(mutex_);
  if (!active_.empty() || joined_ || communicator_->aborted()) return;
  progress->unlock();
  aside_ = true;
  uint64_t now;
  while (aside_ && (now = callers_.load(std::memory_order_relaxed)) != callers_seen_) {
    callers_seen_ = now;
    recalled_.wait_for(lock, kPause, [this] { return !aside_; });
  }
  aside_ = false;
  lock.unlock();
  progress->lock();
}

// Makes the lane's own thread take the progress lock again, because there is work that
// no caller will do. With mutex_ held.
void EagerLane::Recall() {
  if (!std::exchange(aside_, false)) return;
  recalled_.notify_one();
}

// For a caller that waits for `work`: does the work of the lane until `work` has ended
// or kLongestTurn has passed. Returns false if another thread does that work.
bool EagerLane::Drive(const Work& work) {
  if (Gate::IsDriving()) return false;  // a signal handler that has interrupted Turn
  std::unique_lock progress(progress_lock_, std::try_to_lock);
  if (!progress) return false;
  if (!cuda_) {  // only the lane's own thread may use a backend
    const Gate::Driver driver(gate_.get());
    const InterruptsAfter interrupts(kStill);
    const auto until = Clock::now() + kLongestTurn;
    Guarded([&] {
      while (!work.done() && Clock::now() < until && Turn(until).ok()) continue;
    });
  }
  progress.unlock();
  std::lock_guard lock(mutex_);
  ++stats_.driven;
  if (!active_.empty() || joined_ || communicator_->aborted()) Recall();
  return true;
}

}  // namespace ringjax
