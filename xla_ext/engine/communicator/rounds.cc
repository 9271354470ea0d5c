// Rounds: exchanges of one message between all ranks, for the thread of an eager lane,
// which has the communicator to itself. Between rounds that thread sleeps until a peer
// begins the next round. The eager lane defines the messages (engine/eager/).
#include "engine/call/agreement.h"
#include "engine/call/inline_data.h"
#include "engine/communicator/communicator.h"

namespace ringjax {
namespace {

// The call that stands for a round in warnings and errors.
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

Status Communicator::ExchangeRound(const std::string& own,
                                   std::vector<std::string>* all,
                                   Piggyback* piggyback) {
  Piggyback nothing;
  if (piggyback == nullptr) piggyback = &nothing;
  return InTurn(ticket_lock_.Take(), Round(), [&] {
    Frame frame;
    event_ = Event::Now();
    RJ_TRY(Begin(Round(), &frame));
    if (own.size() > kMostMessage)
      return Fail(Round(), {Code::kInternal, "has more to tell than fits a message"});
    if (size() == 1) {
      all->assign(1, own);
      return OkStatus();
    }
    Waiter waiter(doorbell_.get(), &aborted_, options_.spin_seconds, oversubscribed_);
    const Status status =
        ExchangeMessages(frame, own, endpoints_, &waiter, all, piggyback);
    if (!status.ok()) return Fail(Round(), status);
    // A progress report counts the round like a call, although no rank can complete a
    // round after an abort.
    if (progress_) {
      progress_->Done(entered());
      progress_->Returned(entered());
    }
    if (waiting_recorded_) StoppedWaiting();
    return OkStatus();
  });
}

Status Communicator::RunPiggybacked(
    const Call& call, std::span<const std::span<const std::byte>> values) {
  event_ = Event::Now();
  event_.agreed = event_.entered;
  if (Status valid = Validate(call); !valid.ok()) return WithContext(call, valid);
  for (const Request& r : Split(call)) {  // one; none if the tensor is empty
    Values sorted;
    const int other = SortOut(r.problem, r.arithmetic, rank(), values, &sorted);
    if (other >= 0)
      return Fail(call,
                  {Code::kInternal, "has told of other bytes than it gave", other});
    Finish(r.problem, r.arithmetic, sorted, rank(), r.out);
    Count(r, kShared, "piggyback", values[static_cast<size_t>(rank())].size());
  }
  Record(call);
  return OkStatus();
}

Status Communicator::AwaitNextCall(Clock::time_point deadline, bool needed,
                                   bool* called) {
  *called = false;
  if (!resting_) {
    resting_ = std::make_unique<Waiter>(doorbell_.get(), &aborted_,
                                        options_.spin_seconds, oversubscribed_);
    closed_.resize(endpoints_.links.size(), false);
  }
  while (true) {
    if (aborted()) return Aborted(Round());
    const Status gone = LookForCall(called);
    if (*called || woken_.exchange(false)) break;
    if (needed) {
      const Status left = CheckShutdowns(entered() + 1);
      if (!left.ok() || !gone.ok()) return Fail(Round(), left.ok() ? gone : left);
    }
    const Clock::time_point now = Clock::now();
    if (now >= deadline) break;
    resting_->set_slice(deadline - now);
    const Status idle = resting_->Idle([this] {
      // seq_cst: pairs with Wake, which stores woken_ and then loads asleep_. Either
      // this load sees woken_, or Wake sees asleep_ and rings. Otherwise this thread
      // could sleep although Wake has been called.
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

// Sets `*called` if a peer has begun the next round. Otherwise fails if a peer is gone,
// with the rank of that peer.
Status Communicator::LookForCall(bool* called) {
  Status gone;
  if (endpoints_.segment) {
    SharedSegment& segment = *endpoints_.segment;
    const uint64_t turn = segment.own(SharedSegment::kAgreed) + 1;
    for (int peer = 0; peer < size() && !*called; ++peer) {
      uint64_t known = turn - 1;
      if (peer == rank()) continue;
      const Status status =
          segment.Poll(SharedSegment::kAgreed, peer, turn, turn, &known);
      *called = status.ok() && known >= turn;
      if (!status.ok()) gone = status;
    }
    return gone;
  }
  // A round begins with blocks on these links: each rank sends its first block to the
  // ranks 1, 2, 4, ... before it (PassOn in engine/call/agreement.cc).
  for (int reach = 1; reach < size() && !*called; reach *= 2) {
    const int peer = (rank() + reach) % size();
    if (!closed_[peer]) {
      const auto bytes = endpoints_.links[peer]->Peek(1, 1);
      *called = bytes.ok() && !bytes.value().empty();
      closed_[peer] = !bytes.ok();
    }
    if (closed_[peer]) gone = Status(Code::kUnavailable, "closed its link", peer);
  }
  return gone;
}

// Returns what wakes AwaitNextCall: the shared segment, or the links on which a round
// begins. Leaves out closed links, because a closed link would wake it again and again.
std::vector<Waiter::Interest> Communicator::Callers() const {
  if (endpoints_.segment) return {{endpoints_.segment.get(), true, false}};
  std::vector<Waiter::Interest> all;
  for (int reach = 1; reach < size(); reach *= 2) {
    const int peer = (rank() + reach) % size();
    if (!closed_[peer]) all.push_back({endpoints_.links[peer].get(), true, false});
  }
  return all;
}

}  // namespace ringjax
