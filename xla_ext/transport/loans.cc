// See loans.h.
#include "transport/loans.h"

#include <algorithm>
#include <utility>

#include "base/failpoint.h"
#include "transport/ring_link.h"

namespace ringjax {
namespace {

Status Damaged() {
  return Status(Code::kUnavailable, "shared memory is damaged: impossible loan");
}

Status Closed() { return Status(Code::kUnavailable, "the peer closed the link"); }

}  // namespace

Loans::Loans(LoanSide* mine, LoanSide* peer, uint32_t* closed, pid_t pid, Waker* waker)
    : mine_(mine),
      peer_(peer),
      closed_(closed),
      waker_(waker),
      pid_(pid),
      memory_(0, {}) {
  mine_->proof = OwnProof();
}

void Loans::TryReading() {
  met_ = true;
  memory_ = ProcessMemory(pid_, peer_->proof);
  may_borrow_ = memory_.CanRead();
  StoreShared(mine_->reads, may_borrow_ ? kReads : kCannotRead);
}

void Loans::Lend(uint64_t bytes) {
  lent_ += bytes;
  StoreShared(mine_->lent, lent_);
  waker_->WakeIf(kWantsBytes);
}

void Loans::Withdraw() {
  StoreShared(mine_->withdrawn, uint32_t{1});
  // What the caller writes to its memory from now on stays behind that store.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  waker_->WakeIf(kWantsBytes);
}

Result<uint64_t> Loans::Taken() {
  const auto [closed, reads, taken] = Look();
  // Between what was taken before and what is lent.
  if (taken - peer_taken_ > lent_ - peer_taken_) return Damaged();
  if (!reads || IsNews(peer_taken_, taken, lent_)) peer_taken_ = taken;
  refused_ = !reads;
  // What the peer cannot read will be sent.
  if (refused_) lent_ = taken;
  if (closed && taken != lent_) return Closed();
  return peer_taken_;
}

Status Loans::Withdrawn() const {
  if (!gone()) return OkStatus();
  return Status(Code::kUnavailable, "gave the call up while its memory was read");
}

Result<uint64_t> Loans::Ready() {
  RJ_TRY(Withdrawn());
  const bool closed =
      LoadShared(*closed_) != 0;  // before the number, the last one then
  const uint64_t lent = LoadShared(peer_->lent);
  if (lent - taken_ < peer_lent_ - taken_) return Damaged();
  peer_lent_ = lent;
  awaited_ = lent == taken_;
  if (closed && awaited_) return Closed();
  return lent - taken_;
}

Result<uint64_t> Loans::Borrow(std::span<const iovec> to, std::span<const iovec> from) {
  const ptrdiff_t got =
      AtFailpoint(Failpoint::kBorrow).ok() ? memory_.Read(to, from) : -1;
  std::atomic_thread_fence(std::memory_order_seq_cst);  // the look is behind the reads
  RJ_TRY(Withdrawn());
  return static_cast<uint64_t>(std::max<ptrdiff_t>(got, 0));
}

void Loans::Take(uint64_t bytes) {
  const uint64_t before = std::exchange(taken_, taken_ + bytes);
  StoreShared(mine_->taken, taken_);
  if (IsNews(before, taken_, peer_lent_)) waker_->WakeIf(kWantsRoom);
}

void Loans::Refuse() {
  StoreShared(mine_->reads, kCannotRead);
  waker_->WakeIf(kWantsRoom);
}

}  // namespace ringjax
