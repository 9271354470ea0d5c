// Runs calls over the epochs of a resilient communicator. See resilient_comm.h.
#include "engine/communicator/resilient_comm.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "base/failpoint.h"

namespace ringjax {
namespace {

Status GivenUp(const CommitDecision& decision) {
  return Status(Code::kUnavailable,
                (decision.reason.empty() ? "a rank was lost" : decision.reason) +
                    "; the call was given up on all ranks",
                decision.culprit);
}

bool Interrupted() {
  const InterruptCheck check = interrupt_check.load();
  return check != nullptr && check();
}

}  // namespace

// -- epochs ---------------------------------------------------------------------

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
        // The first call that is not committed fails on all ranks. On a rank that has
        // not begun it, the next call must fail in its place.
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
  // This rank takes no part in the new epoch, so its peers must not wait for it.
  if (next)
    next->AbortAndNotifyPeers(Code::kUnavailable, "does not go on: " + end.message());
  return Status(Code::kFailedPrecondition,
                "the resilient communicator has ended: " + end.message(), end.rank());
}

void ResilientComm::End(const Status& status) {
  {
    std::lock_guard lock(mutex_);
    if (end_.ok()) end_ = status;
  }
  changed_.notify_all();
  ticket_lock_.WakeAll();
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

std::vector<int> ResilientComm::Compose(uint64_t from, uint64_t to) const {
  std::vector<int> ranks;  // empty: unchanged
  for (uint64_t g = from; g < to; ++g) {
    if (g == 0 || decisions_[g - 1].ranks.empty()) continue;
    const std::vector<int>& step = decisions_[g - 1].ranks;
    if (ranks.empty()) {
      ranks = step;
      continue;
    }
    for (int& r : ranks)
      r = r >= 0 && static_cast<size_t>(r) < step.size() ? step[r] : -1;
  }
  return ranks;
}

std::vector<int> ResilientComm::Ranks(uint64_t from, uint64_t to) const {
  std::lock_guard lock(mutex_);
  return Compose(from, std::min(to, epoch_index_.load()));
}

// -- calls ---------------------------------------------------------------------------

Status ResilientComm::Stop() const {
  if (Status end = end_status(); !end.ok()) return end;
  if (Interrupted())
    return Status(Code::kCancelled, "interrupted while waiting for its turn");
  return OkStatus();
}

Status ResilientComm::AwaitTurn(const Communicator& caller, uint64_t ticket,
                                const Call& call) {
  const Status turn = ticket_lock_.Wait(ticket, [this] { return Stop(); });
  if (turn.ok()) return turn;
  if (turn.code() == Code::kCancelled) Interrupt(caller, turn.message());
  const Status end = end_status();
  if (end.rank() >= 0 && caller.options().recorder)
    caller.options().recorder->Dump(end.message());
  return caller.WithContext(call, end);
}

Status ResilientComm::Run(const Communicator& caller, uint64_t ticket, const Call& call,
                          uint32_t* epoch) {
  const uint64_t called_in = epoch_index();
  RJ_TRY(AwaitTurn(caller, ticket, call));
  const TicketLockGuard here(&ticket_lock_);
  return Loop(caller, call, called_in, epoch);
}

// Runs the last call of the chain. Then, as long as the calls have not all completed in
// one epoch, runs the first call again that did not complete in the newest epoch. A
// call completes in the same epoch on all ranks, so all ranks run the same calls in the
// same order here.
Status ResilientComm::RunLastOfChain(const Communicator& caller, uint64_t ticket,
                                     std::vector<Communicator::ChainedCall>* pieces) {
  const uint64_t called_in = epoch_index();
  RJ_TRY(AwaitTurn(caller, ticket, *pieces->back().call));
  const TicketLockGuard here(&ticket_lock_);
  auto next = pieces->end() - 1;
  uint32_t newest = 0;
  while (next != pieces->end()) {
    RJ_TRY(Loop(caller, *next->call, called_in, &next->epoch));
    newest = std::max(newest, next->epoch);
    next = std::find_if(pieces->begin(), pieces->end(),
                        [&](const auto& piece) { return piece.epoch != newest; });
  }
  return OkStatus();
}

// Aborts this epoch and ends this ResilientComm after an interrupt. No call can follow:
// an unused ticket, or a call that is not completed, blocks all calls behind it.
void ResilientComm::Interrupt(const Communicator& caller, const std::string& how) {
  if (const auto c = current()) c->AbortAndNotifyPeers(Code::kCancelled, "was " + how);
  const int rank = caller.options().world_ranks[caller.rank()];
  End(Status(Code::kCancelled, "rank " + std::to_string(rank) + " was " + how, rank));
}

ResilientComm::Present ResilientComm::Look() {
  std::lock_guard lock(mutex_);
  Present now{current_.lock(), progress_ ? progress_->begun() : 0, epoch_index_.load(),
              end_};
  if (failing_ == 0 || !now.end.ok()) return now;
  --failing_;
  now.end = GivenUp(decisions_.back());
  return now;
}

Status ResilientComm::Loop(const Communicator& caller, const Call& call,
                           uint64_t called_in, uint32_t* epoch) {
  while (true) {
    const Present now = Look();
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
    if (const Status parked = Park(now.number, &decision); !parked.ok()) {
      if (parked.code() == Code::kCancelled) Interrupt(named, parked.message());
      return named.WithContext(call, EndOr(parked));
    }
    if (attempt.sequence <= decision.finished)
      return now.communicator ? now.communicator->CompleteCommitted(call, attempt)
                              : named.WithContext(call, GivenUp(decision));
    if (!decision.repeats) {
      const auto& c = now.communicator;
      if (!c || c->progress()->begun() < attempt.sequence) FailedOne();
      return named.WithContext(call, GivenUp(decision));
    }
  }
}

// Removes one of the failures that Install has scheduled: that call has failed.
void ResilientComm::FailedOne() {
  std::lock_guard lock(mutex_);
  failing_ = std::max(failing_ - 1, 0);
}

Status ResilientComm::MapRoot(uint64_t from, uint64_t to, Call* call) const {
  const std::vector<int> ranks = Ranks(from, to);
  if (call->root < 0 || static_cast<size_t>(call->root) >= ranks.size())
    return OkStatus();
  const int root = ranks[static_cast<size_t>(call->root)];
  if (root < 0)
    return Status(Code::kUnavailable,
                  "root_rank " + std::to_string(call->root) + " was lost");
  call->root = root;
  return OkStatus();
}

Status ResilientComm::Park(uint64_t number, CommitDecision* decision) {
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
    lock.unlock();  // Interrupted runs Python's signal handlers
    const bool interrupted = Interrupted();
    lock.lock();
    if (interrupted) return Status(Code::kCancelled, "interrupted");
  }
  if (number > 0) *decision = decisions_[number - 1];
  return OkStatus();
}

// Returns the reason why no epoch follows. If this ResilientComm has not ended, returns
// `parked`: why the call did not wait, which is an interrupt or a forked child.
Status ResilientComm::EndOr(const Status& parked) const {
  const Status end = end_status();
  return end.ok() ? parked : end;
}

void ResilientComm::Between(const std::function<void()>& body) {
  const auto stop = [this] { return end_status(); };
  if (!ticket_lock_.Wait(ticket_lock_.Take(), stop).ok()) return;
  const TicketLockGuard here(&ticket_lock_);
  body();
}

// -- a lane --------------------------------------------------------------------------

Status ResilientComm::Judge(uint64_t number, uint64_t sequence) {
  CommitDecision decision;
  const Status parked = Park(number, &decision);
  if (parked.code() == Code::kCancelled)
    End(Status(Code::kCancelled, "this rank was " + parked.message()));
  if (!parked.ok()) return EndOr(parked);
  if (sequence <= decision.finished) return OkStatus();
  return Status(Code::kUnavailable, "revoked: " + decision.reason);
}

Status ResilientComm::Follow(uint64_t since, Change* change) {
  CommitDecision decision;
  for (uint64_t number = since;; number = epoch_index()) {
    const Status parked = Park(number, &decision);
    if (parked.code() == Code::kCancelled)
      End(Status(Code::kCancelled, "this rank was " + parked.message()));
    if (!parked.ok()) return EndOr(parked);
    std::lock_guard lock(mutex_);
    change->communicator = current_.lock();
    if (!change->communicator) continue;  // this rank takes no part in that epoch
    change->epoch_index = epoch_index_.load();
    change->ranks = Compose(since, change->epoch_index);
    change->repeats = true;
    for (uint64_t g = since; g > 0 && g < change->epoch_index; ++g) {
      change->repeats &= decisions_[g - 1].repeats;
      change->reason = decisions_[g - 1].reason;
    }
    return OkStatus();
  }
}

}  // namespace ringjax
