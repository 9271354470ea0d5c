// Implements Rounds: exchanges messages, and waits for the next round. See rounds.h.
#include "engine/communicator/rounds.h"

#include <functional>

#include "engine/call/inline_data.h"

namespace ringjax {
namespace {

// Returns a placeholder call that names a round in warnings and errors.
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

Status Rounds::Exchange(const std::string& own, std::vector<std::string>* all,
                        Piggyback* piggyback) {
  Piggyback nothing;
  if (piggyback == nullptr) piggyback = &nothing;
  const auto exchange = [&]() -> Status {
    Frame frame;
    log_.EnterRound();
    RJ_TRY(runner_.Begin(Round(), &frame));
    if (own.size() > kMaxMessage)
      return failures_.Fail(Round(),
                            {Code::kInternal, "has more to tell than fits a message"});
    if (state_.size() == 1) {
      all->assign(1, own);
      return OkStatus();
    }
    Waiter waiter = state_.NewWaiter();
    const Status status =
        ExchangeMessages(frame, own, state_.endpoints, &waiter, all, piggyback);
    if (!status.ok()) return failures_.Fail(Round(), status);
    // Count the round as a finished call in progress reports, although no rank can
    // complete a round after an abort.
    state_.progress->Done(state_.sequence());
    state_.progress->Returned(state_.sequence());
    stalls_.EndRound();
    return OkStatus();
  };
  return runner_.InTurn(Round(), std::ref(exchange));  // a copy would allocate memory
}

Status Rounds::RunPiggybacked(const Call& call, Requests* requests,
                              std::span<const std::span<const std::byte>> values,
                              Clock::time_point agreed) {
  log_.EnterAgreed(agreed);
  if (requests->empty()) {
    if (Status valid = runner_.Validate(call); !valid.ok())
      return failures_.WithContext(call, valid);
    // If the tensor is empty, Split returns no request.
    *requests = Split(call, state_.rank(), state_.size());
  }
  for (const Request& r : *requests) {
    Spans out;  // not r.out, whose address may be that of an earlier call
    out.Add(call.tensors[0].out, r.out.bytes());
    Values sorted;
    const int other =
        ReadPiggybacked(r.problem, r.arithmetic, state_.rank(), values, &sorted);
    if (other >= 0)
      return failures_.Fail(
          call, {Code::kInternal, "has told of other bytes than it gave", other});
    FinishInline(r.problem, r.arithmetic, sorted, state_.rank(), out);
    log_.Count(r, kShared, "piggyback",
               values[static_cast<size_t>(state_.rank())].size());
  }
  log_.Succeeded(call);
  return OkStatus();
}

Status Rounds::AwaitNext(Clock::time_point deadline, bool required, bool* begun) {
  *begun = false;
  if (!waiter_) {
    waiter_ = std::make_unique<Waiter>(state_.NewWaiter());
    closed_.resize(state_.endpoints.links.size(), false);
  }
  while (true) {
    if (state_.abort.aborted()) return failures_.Aborted(Round());
    const Status gone = LookForRound(begun);
    if (*begun || woken_.exchange(false)) break;
    if (required) {
      const Status left = state_.abort.CheckShutdowns(state_.sequence() + 1);
      if (!left.ok() || !gone.ok())
        return failures_.Fail(Round(), left.ok() ? gone : left);
    }
    const Clock::time_point now = Clock::now();
    if (now >= deadline) break;
    waiter_->set_slice(deadline - now);
    const Status idle = waiter_->Idle([this] {
      // These accesses are seq_cst, as in Wake, which stores woken_ and then loads
      // asleep_. So either this load sees woken_, or Wake sees asleep_ and rings the
      // doorbell. With a weaker order, this thread could sleep although Wake has been
      // called.
      asleep_.store(true);
      if (woken_.load()) state_.doorbell->Ring();
      return Interests();
    });
    asleep_.store(false);
    if (!idle.ok()) return failures_.Fail(Round(), idle);
  }
  waiter_->Progressed();
  return OkStatus();
}

void Rounds::Wake() {
  if (woken_.exchange(true)) return;
  if (asleep_.exchange(false)) state_.doorbell->Ring();
}

// Sets `*begun` if a peer has begun the next round. Otherwise fails if a peer is gone,
// with the rank of that peer.
Status Rounds::LookForRound(bool* begun) {
  Status gone;
  if (state_.endpoints.segment) {
    SharedSegment& segment = *state_.endpoints.segment;
    const uint64_t turn = segment.own(SharedSegment::kAgreed) + 1;
    for (int peer = 0; peer < state_.size() && !*begun; ++peer) {
      uint64_t known = turn - 1;
      if (peer == state_.rank()) continue;
      const Status status =
          segment.Poll(SharedSegment::kAgreed, peer, turn, turn, &known);
      *begun = status.ok() && known >= turn;
      if (!status.ok()) gone = status;
    }
    return gone;
  }
  // A rank begins a round by sending the first bytes of all its messages
  // (ExchangeOverLinks in engine/call/agreement.cc).
  for (const auto& [to, peer, ranks] : state_.endpoints.dissemination.steps) {
    if (*begun) break;
    if (!closed_[peer]) {
      const auto bytes = state_.endpoints.links[peer]->Peek(1, 1);
      *begun = bytes.ok() && !bytes.value().empty();
      closed_[peer] = !bytes.ok();
    }
    if (closed_[peer]) gone = Status(Code::kUnavailable, "closed its link", peer);
  }
  return gone;
}

// Returns the objects that wake AwaitNext: the shared segment, or the links on which a
// round begins. Omits closed links, which would wake AwaitNext again and again.
std::vector<Waiter::Interest> Rounds::Interests() const {
  if (state_.endpoints.segment) return {{state_.endpoints.segment.get(), true, false}};
  std::vector<Waiter::Interest> all;
  for (const auto& [to, peer, ranks] : state_.endpoints.dissemination.steps)
    if (!closed_[peer])
      all.push_back({state_.endpoints.links[peer].get(), true, false});
  return all;
}

}  // namespace ringjax
