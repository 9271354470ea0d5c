// Calls that outlive generations. See succession.h.
#include "engine/communicator/succession.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "base/failpoint.h"

namespace ringjax {
namespace {

Status GivenUp(const Verdict& verdict) {
  return Status(Code::kUnavailable,
                (verdict.reason.empty() ? "a rank was lost" : verdict.reason) +
                    "; the call was given up on all ranks",
                verdict.culprit);
}

bool Interrupted() {
  const InterruptCheck check = interrupt_check.load();
  return check != nullptr && check();
}

}  // namespace

// -- generations ---------------------------------------------------------------------

Status Succession::Install(std::shared_ptr<Communicator> next, Verdict verdict) {
  RJ_FAILPOINT(kInstall);
  Status end;
  std::shared_ptr<Communicator> last;  // dies without the lock, if it does
  {
    std::lock_guard lock(mutex_);
    end = end_;
    if (end.ok()) {
      const uint64_t number = generation_.load() + 1;
      if (number > 1) {
        last = current_.lock();
        // Who has begun the call that fails will find out by itself.
        const uint64_t begun = progress_ ? progress_->begun() : 0;
        if (!verdict.repeats && begun <= verdict.finished) ++failing_;
        if (last) {
          const Status why = last->abort_status();
          if (verdict.reason.empty()) verdict.reason = why.message();
          verdict.culprit = why.rank();
        }
        verdicts_.push_back(std::move(verdict));
      }
      if (next) next->Installed(number);
      current_ = next;
      progress_ = next ? next->progress() : nullptr;
      generation_.store(number, std::memory_order_release);
    }
  }
  changed_.notify_all();
  if (end.ok()) return end;
  // The peers count on this rank, and should not wait for it.
  if (next) next->GiveUp(Code::kUnavailable, "does not go on: " + end.message());
  return Status(Code::kFailedPrecondition, "the succession has ended: " + end.message(),
                end.rank());
}

void Succession::End(const Status& status) {
  {
    std::lock_guard lock(mutex_);
    if (end_.ok()) end_ = status;
  }
  changed_.notify_all();
  turnstile_.WakeAll();
}

void Succession::Resume() {
  std::lock_guard lock(mutex_);
  failing_ = 0;
}

std::shared_ptr<Communicator> Succession::current() const {
  std::lock_guard lock(mutex_);
  return end_.ok() ? current_.lock() : nullptr;
}

Status Succession::end_status() const {
  std::lock_guard lock(mutex_);
  return end_;
}

std::vector<int> Succession::Compose(uint64_t from, uint64_t to) const {
  std::vector<int> ranks;  // empty: as they were
  for (uint64_t g = from; g < to; ++g) {
    if (g == 0 || verdicts_[g - 1].ranks.empty()) continue;
    const std::vector<int>& step = verdicts_[g - 1].ranks;
    if (ranks.empty()) {
      ranks = step;
      continue;
    }
    for (int& r : ranks)
      r = r >= 0 && static_cast<size_t>(r) < step.size() ? step[r] : -1;
  }
  return ranks;
}

std::vector<int> Succession::Ranks(uint64_t from, uint64_t to) const {
  std::lock_guard lock(mutex_);
  return Compose(from, std::min(to, generation_.load()));
}

// -- calls ---------------------------------------------------------------------------

Status Succession::Stop() const {
  if (Status end = end_status(); !end.ok()) return end;
  if (Interrupted())
    return Status(Code::kCancelled, "interrupted while waiting for its turn");
  return OkStatus();
}

Status Succession::AwaitTurn(const Communicator& caller, uint64_t ticket,
                             const Call& call) {
  const Status turn = turnstile_.Wait(ticket, [this] { return Stop(); });
  if (turn.ok()) return turn;
  if (turn.code() == Code::kCancelled) Interrupt(caller, turn.message());
  const Status end = end_status();
  if (end.rank() >= 0 && caller.recorder()) caller.recorder()->Dump(end.message());
  return caller.Named(call, end);
}

Status Succession::Run(const Communicator& caller, uint64_t ticket, const Call& call,
                       uint32_t* epoch) {
  const uint64_t called_in = generation();
  RJ_TRY(AwaitTurn(caller, ticket, call));
  const Turn here(&turnstile_);
  return Loop(caller, call, called_in, epoch);
}

// All ranks find the same epochs, since a call ends in the same one everywhere, and so
// repeat the same calls in the same order.
Status Succession::RunLast(const Communicator& caller, uint64_t ticket,
                           std::vector<Communicator::Piece>* pieces) {
  const uint64_t called_in = generation();
  RJ_TRY(AwaitTurn(caller, ticket, *pieces->back().call));
  const Turn here(&turnstile_);
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

// A turn was lost, or the call that has it: nothing can follow on this rank.
void Succession::Interrupt(const Communicator& caller, const std::string& how) {
  if (const auto c = current()) c->GiveUp(Code::kCancelled, "was " + how);
  const int rank = caller.options().members[caller.rank()];
  End(Status(Code::kCancelled, "rank " + std::to_string(rank) + " was " + how, rank));
}

Succession::Present Succession::Look() {
  std::lock_guard lock(mutex_);
  Present now{current_.lock(), progress_ ? progress_->begun() : 0, generation_.load(),
              end_};
  if (failing_ == 0 || !now.end.ok()) return now;
  --failing_;
  now.end = GivenUp(verdicts_.back());
  return now;
}

Status Succession::Loop(const Communicator& caller, const Call& call,
                        uint64_t called_in, uint32_t* epoch) {
  while (true) {
    const Present now = Look();
    const Communicator& named = now.communicator ? *now.communicator : caller;
    if (!now.end.ok()) return named.Named(call, now.end);
    Attempt attempt;
    attempt.sequence = now.begun + 1;
    if (now.communicator) {
      if (epoch) *epoch = now.communicator->epoch();
      Status status;
      if (called_in != now.number && call.op == Collective::kBroadcast) {
        Call mapped = call;
        status = MapRoot(called_in, now.number, &mapped);
        if (!status.ok()) return named.Named(call, status);
        status = now.communicator->Try(mapped, &attempt);
      } else {
        status = now.communicator->Try(call, &attempt);
      }
      if (attempt.over || !end_status().ok()) return status;
    }
    Verdict verdict;
    if (const Status parked = Park(now.number, &verdict); !parked.ok()) {
      if (parked.code() == Code::kCancelled) Interrupt(named, parked.message());
      return named.Named(call, end_status());
    }
    if (attempt.sequence <= verdict.finished)
      return now.communicator ? now.communicator->Complete(call, attempt)
                              : named.Named(call, GivenUp(verdict));
    if (!verdict.repeats) {
      const auto& c = now.communicator;
      if (!c || c->progress()->begun() < attempt.sequence) FailedOne();
      return named.Named(call, GivenUp(verdict));
    }
  }
}

// The call that had to fail next has.
void Succession::FailedOne() {
  std::lock_guard lock(mutex_);
  failing_ = std::max(failing_ - 1, 0);
}

Status Succession::MapRoot(uint64_t from, uint64_t to, Call* call) const {
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

Status Succession::Park(uint64_t number, Verdict* verdict) {
  const auto start = Clock::now();
  std::shared_ptr<Communicator> last;
  std::unique_lock lock(mutex_);
  while (generation_.load() <= number) {
    if (!end_.ok()) return end_;
    if (!owner_.IsHere())
      return Status(Code::kFailedPrecondition, "this process was forked");
    const std::chrono::duration<double> waited = Clock::now() - start;
    if (patience_ > 0 && waited.count() >= patience_) {
      last = current_.lock();
      end_ = Status(Code::kUnavailable,
                    "the ranks that are left have not gone on within " +
                        Digits(patience_) + " s" +
                        (last ? " after: " + last->abort_status().message() : ""),
                    last ? last->abort_status().rank() : -1);
      return end_;
    }
    changed_.wait_for(lock, std::chrono::milliseconds(100));
    lock.unlock();  // this runs the handlers of signals
    const bool interrupted = Interrupted();
    lock.lock();
    if (interrupted) return Status(Code::kCancelled, "interrupted");
  }
  if (number > 0) *verdict = verdicts_[number - 1];
  return OkStatus();
}

void Succession::Between(const std::function<void()>& body) {
  const auto stop = [this] { return end_status(); };
  if (!turnstile_.Wait(turnstile_.Take(), stop).ok()) return;
  const Turn here(&turnstile_);
  body();
}

// -- a lane --------------------------------------------------------------------------

Status Succession::Judge(uint64_t number, uint64_t sequence) {
  Verdict verdict;
  const Status parked = Park(number, &verdict);
  if (parked.code() == Code::kCancelled)
    End(Status(Code::kCancelled, "this rank was " + parked.message()));
  if (!parked.ok()) return end_status();
  if (sequence <= verdict.finished) return OkStatus();
  return Status(Code::kUnavailable, "revoked: " + verdict.reason);
}

Status Succession::Follow(uint64_t since, Change* change) {
  Verdict verdict;
  for (uint64_t number = since;; number = generation()) {
    const Status parked = Park(number, &verdict);
    if (parked.code() == Code::kCancelled)
      End(Status(Code::kCancelled, "this rank was " + parked.message()));
    if (!parked.ok()) return end_status();
    std::lock_guard lock(mutex_);
    change->communicator = current_.lock();
    if (!change->communicator) continue;  // it never came to life
    change->generation = generation_.load();
    change->ranks = Compose(since, change->generation);
    change->repeats = true;
    for (uint64_t g = since; g > 0 && g < change->generation; ++g) {
      change->repeats &= verdicts_[g - 1].repeats;
      change->reason = verdicts_[g - 1].reason;
    }
    return OkStatus();
  }
}

}  // namespace ringjax
