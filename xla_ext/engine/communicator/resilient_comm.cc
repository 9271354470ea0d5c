// Implements ResilientComm: installs epochs, and runs a call again if its epoch ends.
// See resilient_comm.h.
#include "engine/communicator/resilient_comm.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "base/failpoint.h"

namespace ringjax {
namespace {

Status GivenUpError(const CommitDecision& decision) {
  return Status(Code::kUnavailable,
                (decision.reason.empty() ? "a rank was lost" : decision.reason) +
                    "; the call was given up on all ranks",
                decision.culprit);
}

}  // namespace

// -- installing and ending epochs ----------------------------------------------------

Status ResilientComm::Install(std::shared_ptr<Communicator> next,
                              CommitDecision decision) {
  RJ_FAILPOINT(kInstall);
  Status end;
  std::shared_ptr<Communicator> last;  // its destructor must not run under the lock
  {
    std::lock_guard lock(mutex_);
    end = end_;
    if (end.ok()) {
      const uint64_t number = epoch_index_.load() + 1;
      if (number > 1) {
        last = current_.lock();
        // The first call that is not committed fails on all ranks. If this rank has not
        // begun that call, its next call must fail instead.
        const uint64_t begun = progress_ ? progress_->begun() : 0;
        if (!decision.repeats && begun <= decision.finished) ++failing_;
        if (last) {
          const Status why = last->abort_status();
          if (decision.reason.empty()) decision.reason = why.message();
          decision.culprit = why.rank();
        }
        decisions_.push_back(std::move(decision));
      }
      if (next) next->OnInstalled(number);
      current_ = next;
      progress_ = next ? next->progress() : nullptr;
      epoch_index_.store(number, std::memory_order_release);
    }
  }
  changed_.notify_all();
  if (end.ok()) return end;
  // This rank does not take part in the new epoch, so its peers must not wait for it.
  if (next)
    next->AbortAndNotifyPeers(Code::kUnavailable, "does not go on: " + end.message());
  return Status(Code::kFailedPrecondition,
                "the resilient communicator has ended: " + end.message(), end.rank());
}

bool ResilientComm::End(const Status& status) {
  bool first = false;
  {
    std::lock_guard lock(mutex_);
    first = end_.ok();
    if (first) end_ = status;
  }
  changed_.notify_all();
  ticket_lock_.WakeAll();
  return first;
}

void ResilientComm::Resume() {
  std::lock_guard lock(mutex_);
  failing_ = 0;
}

std::shared_ptr<Communicator> ResilientComm::current() const {
  std::lock_guard lock(mutex_);
  return end_.ok() ? current_.lock() : nullptr;
}

Status ResilientComm::end_status() const {
  std::lock_guard lock(mutex_);
  return end_;
}

ResilientComm::Change ResilientComm::Changes(uint64_t from, uint64_t to) const {
  std::lock_guard lock(mutex_);
  Change all;
  if (to > 1) all.reason = decisions_[to - 2].reason;
  for (uint64_t g = std::max<uint64_t>(from, 1); g < to; ++g) {
    const CommitDecision& step = decisions_[g - 1];
    const bool first = all.ranks.empty();
    all.repeats &= step.repeats;
    if (first) all.ranks = step.ranks;
    if (first || step.ranks.empty()) continue;
    for (int& r : all.ranks)
      r = r >= 0 && static_cast<size_t>(r) < step.ranks.size() ? step.ranks[r] : -1;
  }
  return all;
}

// -- running calls -------------------------------------------------------------------

Status ResilientComm::AwaitTurn(const FailureReport& caller, uint64_t ticket,
                                const Call& call) {
  Status turn = ticket_lock_.Wait(ticket, [&] {
    if (end_status().ok() && Interrupted())
      EndByInterrupt(caller, "interrupted while waiting for its turn");
    return end_status();
  });
  if (!turn.ok()) {
    caller.Dump(turn);
    turn = caller.WithContext(call, turn);
  }
  return turn;
}

Status ResilientComm::Run(Communicator& caller, uint64_t ticket, const Call& call,
                          uint32_t* epoch) {
  const uint64_t called_in = epoch_index();
  return InTurn(caller.failures(), ticket, call,
                [&] { return RunInEpochs(caller, call, called_in, epoch); });
}

// Runs the last call of the chain. Then repeats the first call that did not complete in
// the newest epoch, until all calls have completed in one epoch. A call completes in
// the same epoch on all ranks, so all ranks run the same calls here, in the same order.
Status ResilientComm::RunLastOfChain(Communicator& caller, uint64_t ticket,
                                     std::vector<Communicator::ChainedCall>* pieces) {
  const uint64_t called_in = epoch_index();
  return InTurn(caller.failures(), ticket, *pieces->back().call, [&] {
    auto next = pieces->end() - 1;
    uint32_t newest = 0;
    while (next != pieces->end()) {
      RJ_TRY(RunInEpochs(caller, *next->call, called_in, &next->epoch));
      newest = std::max(newest, next->epoch);
      next = std::find_if(pieces->begin(), pieces->end(),
                          [&](const auto& piece) { return piece.epoch != newest; });
    }
    return OkStatus();
  });
}

// Aborts the current epoch and ends this ResilientComm after an interrupt. No call
// could follow anyway, because an unused ticket or an incomplete call blocks all calls
// behind it.
void ResilientComm::EndByInterrupt(const FailureReport& caller,
                                   const std::string& how) {
  const auto present = current();
  const FailureReport& failures = present ? present->failures() : caller;
  failures.AbortAndNotifyPeers(Code::kCancelled, "was " + how, -1);
}

ResilientComm::Snapshot ResilientComm::TakeSnapshot() {
  std::lock_guard lock(mutex_);
  Snapshot now{current_.lock(), progress_ ? progress_->begun() : 0, epoch_index_.load(),
               end_};
  if (failing_ == 0 || !now.end.ok()) return now;
  --failing_;
  now.end = GivenUpError(decisions_.back());
  return now;
}

Status ResilientComm::RunInEpochs(Communicator& caller, const Call& call,
                                  uint64_t called_in, uint32_t* epoch) {
  // In a static job, `caller` is the only epoch, and its error is final. So this path
  // needs neither the mutex nor the shared_ptr of TakeSnapshot.
  if (!repairs_) {
    CallAttempt attempt;
    if (epoch) *epoch = caller.epoch();
    return caller.Attempt(call, &attempt);
  }
  while (true) {
    const Snapshot now = TakeSnapshot();
    const Communicator& named = now.communicator ? *now.communicator : caller;
    if (!now.end.ok()) return named.WithContext(call, now.end);
    CallAttempt attempt;
    attempt.sequence = now.begun + 1;
    if (now.communicator) {
      if (epoch) *epoch = now.communicator->epoch();
      Status status;
      if (called_in != now.number && call.op == Collective::kBroadcast) {
        Call mapped = call;
        status = MapRoot(called_in, now.number, &mapped);
        if (!status.ok()) return named.WithContext(call, status);
        status = now.communicator->Attempt(mapped, &attempt);
      } else {
        status = now.communicator->Attempt(call, &attempt);
      }
      if (attempt.globally_complete || !end_status().ok()) return status;
    }
    CommitDecision decision;
    if (Status s = Park(now.number, &decision, &named.failures()); !s.ok())
      return named.WithContext(call, s);
    if (attempt.sequence <= decision.finished)
      return now.communicator ? now.communicator->CompleteCommitted(call, attempt)
                              : named.WithContext(call, GivenUpError(decision));
    if (!decision.repeats) {
      const auto& c = now.communicator;
      if (!c || c->progress()->begun() < attempt.sequence) CancelScheduledFailure();
      return named.WithContext(call, GivenUpError(decision));
    }
  }
}

// Removes one of the failures that Install has scheduled for later calls, because the
// current call fails instead.
void ResilientComm::CancelScheduledFailure() {
  std::lock_guard lock(mutex_);
  failing_ = std::max(failing_ - 1, 0);
}

Status ResilientComm::MapRoot(uint64_t from, uint64_t to, Call* call) const {
  const std::vector<int> ranks = Changes(from, to).ranks;
  if (call->root < 0 || static_cast<size_t>(call->root) >= ranks.size())
    return OkStatus();
  const int root = ranks[static_cast<size_t>(call->root)];
  if (root < 0)
    return Status(Code::kUnavailable,
                  "root_rank " + std::to_string(call->root) + " was lost");
  call->root = root;
  return OkStatus();
}

Status ResilientComm::Park(uint64_t number, CommitDecision* decision,
                           const FailureReport* caller) {
  const auto start = Clock::now();
  std::shared_ptr<Communicator> last;
  std::unique_lock lock(mutex_);
  while (epoch_index_.load() <= number) {
    if (!end_.ok()) return end_;
    if (!owner_.IsHere())
      return Status(Code::kFailedPrecondition, "this process was forked");
    const std::chrono::duration<double> waited = Clock::now() - start;
    if (epoch_timeout_ > 0 && waited.count() >= epoch_timeout_) {
      last = current_.lock();
      end_ = Status(Code::kUnavailable,
                    "the ranks that are left have not gone on within " +
                        Digits(epoch_timeout_) + " s" +
                        (last ? " after: " + last->abort_status().message() : ""),
                    last ? last->abort_status().rank() : -1);
      return end_;
    }
    changed_.wait_for(lock, std::chrono::milliseconds(100));
    lock.unlock();
    const bool interrupted = Interrupted();
    if (interrupted && caller) EndByInterrupt(*caller, "interrupted");
    if (interrupted) End(Status(Code::kCancelled, "this rank was interrupted"));
    lock.lock();
    if (interrupted) return end_;
  }
  if (number > 0) *decision = decisions_[number - 1];
  return OkStatus();
}

void ResilientComm::Between(const std::function<void()>& body) {
  const auto stop = [this] { return end_status(); };
  if (!ticket_lock_.Wait(ticket_lock_.Take(), stop).ok()) return;
  const TicketLockGuard here(&ticket_lock_);
  body();
}

// -- functions for the eager lane ----------------------------------------------------

Status ResilientComm::AwaitDecision(uint64_t number, uint64_t sequence) {
  CommitDecision decision;
  RJ_TRY(Park(number, &decision));
  if (sequence <= decision.finished) return OkStatus();
  return Status(Code::kUnavailable, "revoked: " + decision.reason);
}

Status ResilientComm::AwaitNextEpoch(uint64_t since,
                                     std::shared_ptr<Communicator>* next) {
  CommitDecision decision;
  for (uint64_t number = since;; number = epoch_index()) {
    RJ_TRY(Park(number, &decision));
    std::lock_guard lock(mutex_);
    *next = current_.lock();
    // Without a communicator, this rank does not take part in that epoch.
    if (*next) return OkStatus();
  }
}

}  // namespace ringjax
