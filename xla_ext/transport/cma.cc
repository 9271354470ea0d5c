// The CMA protocol and its memory order. See cma.h.
//
// All shared words but the proof are loaded and stored seq_cst, for two reasons.
// Release and acquire order the data: the bytes that the sender wrote before Expose are
// the bytes that the receiver copies after PollExposed, and the copy is over before the
// sender sees its acknowledgement. The single total order protects the wake-ups: a side
// that makes progress stores its count and then loads the peer's `wants`, while a side
// that goes to sleep (RingLink::Arm) stores `wants` and then loads the count. The side
// whose store comes second sees the other side's store, so no wake-up is lost. With
// release and acquire alone, each load could miss the other side's store.
#include "transport/cma.h"

#include <algorithm>
#include <utility>

#include "base/failpoint.h"
#include "transport/ring_link.h"

namespace ringjax {
namespace {

Status Damaged() {
  return Status(Code::kUnavailable, "shared memory is damaged: impossible byte count");
}

Status Closed() { return Status(Code::kUnavailable, "has closed the link"); }

}  // namespace

CmaEndpoint::CmaEndpoint(CmaState* own, CmaState* peer, uint32_t* closed, Waker* waker)
    : own_(own), peer_(peer), closed_(closed), waker_(waker), peer_memory_(0, {}) {
  own_->proof = OwnProof();  // a plain store: the ring's first byte releases the proof
}

void CmaEndpoint::Probe() {
  probed_ = true;
  // A plain load is enough: reading the ring's first byte has acquired the proof.
  peer_memory_ = ProcessMemory(waker_->Process(), peer_->proof);
  can_read_ = peer_memory_.CanRead();
  StoreShared(own_->can_read, can_read_ ? kCanRead : kCannotRead);
}

void CmaEndpoint::Expose(uint64_t bytes) {
  exposed_ += bytes;
  // Releases the message bytes written so far. Pairs with PollExposed, and with the
  // receiver's Arm for the wake-up.
  StoreShared(own_->exposed, exposed_);
  waker_->WakeIf(kWantsBytes);
}

void CmaEndpoint::Invalidate() {
  // The writer's half of a seqlock; pairs with Read. The flag must be visible before
  // the first byte that the caller writes to the buffer from here on. The store alone
  // does not order later writes, so a fence follows.
  StoreShared(own_->invalidated, uint32_t{1});
  std::atomic_thread_fence(std::memory_order_seq_cst);
  waker_->WakeIf(kWantsBytes);
}

Result<uint64_t> CmaEndpoint::PollAcknowledged() {
  const auto [closed, can_read, acknowledged] = LoadPeer();
  // A valid count lies in [peer_acknowledged_, exposed_]. The differences are unsigned,
  // so a count that went backwards is out of range, too.
  if (acknowledged - peer_acknowledged_ > exposed_ - peer_acknowledged_)
    return Damaged();
  if (!can_read || AckDue(peer_acknowledged_, acknowledged, exposed_))
    peer_acknowledged_ = acknowledged;
  fell_back_ = !can_read;
  // The exposed count in shared memory stays as it is: after a fallback neither side
  // uses that count again.
  if (fell_back_) exposed_ = acknowledged;
  if (closed && acknowledged != exposed_) return Closed();
  return peer_acknowledged_;
}

Status CmaEndpoint::CheckValid() const {
  if (!invalidated()) return OkStatus();
  return Status(Code::kUnavailable, "gave the call up while its memory was read");
}

Result<uint64_t> CmaEndpoint::PollExposed() {
  RJ_TRY(CheckValid());
  // The flag is loaded before the count: a peer that has closed exposes nothing more,
  // so the count is final if the flag is set.
  const bool closed = LoadShared(*closed_) != 0;
  // Acquires the message bytes: the kernel copies them after this load. There is no
  // upper bound to check, because the caller never reads beyond the announced pieces.
  const uint64_t exposed = LoadShared(peer_->exposed);
  if (exposed - acknowledged_ < peer_exposed_ - acknowledged_) return Damaged();
  peer_exposed_ = exposed;
  awaits_exposed_ = exposed == acknowledged_;
  if (closed && awaits_exposed_) return Closed();
  return exposed - acknowledged_;
}

Result<uint64_t> CmaEndpoint::Read(std::span<const iovec> local,
                                   std::span<const iovec> remote) {
  const ptrdiff_t copied =
      AtFailpoint(Failpoint::kCmaRead).ok() ? peer_memory_.Read(local, remote) : -1;
  // The reader's half of the seqlock (see Invalidate): only a check after the copy
  // proves that the copied bytes were valid, and the fence keeps the copy before the
  // check (Boehm, "Can seqlocks get along with programming language memory models?",
  // MSPC 2012).
  std::atomic_thread_fence(std::memory_order_seq_cst);
  RJ_TRY(CheckValid());
  return static_cast<uint64_t>(std::max<ptrdiff_t>(copied, 0));
}

void CmaEndpoint::Acknowledge(uint64_t bytes) {
  const uint64_t before = std::exchange(acknowledged_, acknowledged_ + bytes);
  // Releases the copies: a sender that sees this count may overwrite those bytes. Pairs
  // with PollAcknowledged, and with the sender's Arm for the wake-up.
  StoreShared(own_->acknowledged, acknowledged_);
  if (AckDue(before, acknowledged_, peer_exposed_)) waker_->WakeIf(kWantsRoom);
}

void CmaEndpoint::FallBack() {
  // This store follows the last Acknowledge: LoadPeer relies on that order.
  StoreShared(own_->can_read, kCannotRead);
  waker_->WakeIf(kWantsRoom);
}

}  // namespace ringjax
