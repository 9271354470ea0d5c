// Rounds: a communicator as a meeting place, for a thread that has it to itself. It
// gives all ranks a message, or rests until somebody wants to. What the messages mean
// is its user's matter (engine/eager/).
#include "engine/call/agreement.h"
#include "engine/call/notes.h"
#include "engine/communicator/communicator.h"

namespace ringjax {
namespace {

// What a round is called in warnings and errors.
const Call& Round() {
  static const Call& round = *[] {
    auto* call = new Call;
    call->op = Collective::kBarrier;
    call->name = "next round of eager operations";
    return call;
  }();
  return round;
}

}  // namespace

Status Communicator::Exchange(const std::string& own, std::vector<std::string>* all,
                              Beside* beside) {
  Beside nothing;
  if (beside == nullptr) beside = &nothing;
  return InTurn(turnstile_.Take(), Round(), [&] {
    Frame frame;
    event_ = Event::Now();
    RJ_TRY(Begin(Round(), &frame));
    if (own.size() > kMostMessage)
      return Fail(Round(), {Code::kInternal, "has more to tell than fits a message"});
    if (size() == 1) {
      all->assign(1, own);
      return OkStatus();
    }
    Waiter waiter(doorbell_.get(), &aborted_, options_.spin_seconds, crowded_);
    const Status status = ExchangeMessages(frame, own, lane_, &waiter, all, beside);
    if (!status.ok()) return Fail(Round(), status);
    // A call like others, in what is reported; only that nobody can finish it later.
    if (progress_) {
      progress_->Done(entered());
      progress_->Returned(entered());
    }
    if (noted_) StoppedWaiting();
    return OkStatus();
  });
}

Status Communicator::RunBeside(const Call& call,
                               std::span<const std::span<const std::byte>> values) {
  event_ = Event::Now();
  event_.agreed = event_.entered;
  if (Status valid = Validate(call); !valid.ok()) return Named(call, valid);
  for (const Request& r : Split(call)) {  // one, or none of nothing
    Values sorted;
    const int other = SortOut(r.problem, r.arithmetic, rank(), values, &sorted);
    if (other >= 0)
      return Fail(call,
                  {Code::kInternal, "has told of other bytes than it gave", other});
    Finish(r.problem, r.arithmetic, sorted, rank(), r.out);
    Count(r, kShared, values[static_cast<size_t>(rank())].size());
  }
  Record(call);
  return OkStatus();
}

Status Communicator::Await(Clock::time_point deadline, bool needed, bool* called) {
  *called = false;
  if (!resting_) {
    resting_ = std::make_unique<Waiter>(doorbell_.get(), &aborted_,
                                        options_.spin_seconds, crowded_);
    closed_.resize(lane_.links.size(), false);
  }
  while (true) {
    if (aborted()) return Aborted(Round());
    const Status gone = LookForCall(called);
    if (*called || woken_.exchange(false)) break;
    if (needed) {
      const Status left = CheckLeft(entered() + 1);
      if (!left.ok() || !gone.ok()) return Fail(Round(), left.ok() ? gone : left);
    }
    const Clock::time_point now = Clock::now();
    if (now >= deadline) break;
    resting_->set_slice(deadline - now);
    const Status idle = resting_->Idle([this] {
      // Looked at again after this is known, or Wake might have thought us awake.
      asleep_.store(true);
      if (woken_.load()) doorbell_->Ring();
      return Callers();
    });
    asleep_.store(false);
    if (!idle.ok()) return Fail(Round(), idle);
  }
  resting_->Progressed();
  return OkStatus();
}

void Communicator::Wake() {
  if (woken_.exchange(true)) return;
  if (asleep_.exchange(false)) doorbell_->Ring();
}

// Not ok: a peer is gone, and has begun no call before it went.
Status Communicator::LookForCall(bool* called) {
  Status gone;
  if (lane_.board) {
    Board& board = *lane_.board;
    const uint64_t turn = board.mine(Board::kAgreed) + 1;
    for (int peer = 0; peer < size() && !*called; ++peer) {
      uint64_t known = turn - 1;
      if (peer == rank()) continue;
      const Status status = board.Follow(Board::kAgreed, peer, turn, turn, &known);
      *called = status.ok() && known >= turn;
      if (!status.ok()) gone = status;
    }
    return gone;
  }
  // A call begins on one of these links: with PassOn's first block, or Agree's frame.
  for (int reach = 1; reach < size() && !*called; reach *= 2) {
    const int peer = (rank() + reach) % size();
    if (!closed_[peer]) {
      const auto bytes = lane_.links[peer]->Peek(1, 1);
      *called = bytes.ok() && !bytes.value().empty();
      closed_[peer] = !bytes.ok();
    }
    if (closed_[peer]) gone = Status(Code::kUnavailable, "closed its link", peer);
  }
  return gone;
}

// What to be woken by. A closed link would wake us for ever.
std::vector<Waiter::Interest> Communicator::Callers() const {
  if (lane_.board) return {{lane_.board.get(), true, false}};
  std::vector<Waiter::Interest> all;
  for (int reach = 1; reach < size(); reach *= 2) {
    const int peer = (rank() + reach) % size();
    if (!closed_[peer]) all.push_back({lane_.links[peer].get(), true, false});
  }
  return all;
}

}  // namespace ringjax
