// See ring_link.h.
#include "transport/ring_link.h"

#include "base/status.h"

namespace ringjax {
namespace {

// A long copy is published in parts of this many bytes, so that both sides copy at the
// same time.
constexpr size_t kPublishEvery = 32 << 10;

// Moves bytes between `pieces` and a ring, and calls `publish` after each part. Ends
// early if `move(at, left, limit)`, which moves at most `limit` of the `left` bytes of
// a piece and returns how many bytes moved, returns 0. Returns the total.
template <typename Move, typename Publish>
size_t MovePieces(std::span<const iovec> pieces, const Move& move,
                  const Publish& publish) {
  size_t moved = 0, hidden = 0;
  for (const iovec& piece : pieces) {
    std::byte* at = static_cast<std::byte*>(piece.iov_base);
    for (size_t left = piece.iov_len; left > 0;) {
      const size_t n = move(at, left, kPublishEvery - hidden);
      if (n == 0) {
        if (hidden > 0) publish();
        return moved;
      }
      at += n;
      left -= n;
      moved += n;
      hidden += n;
      if (hidden == kPublishEvery) {
        publish();
        hidden = 0;
      }
    }
  }
  if (hidden > 0) publish();
  return moved;
}

}  // namespace

Result<std::unique_ptr<Link>> MakeRingLink(Doorbell* doorbell, int peer) {
  const HostMemory& memory = *doorbell->memory();
  if (peer < 0 || peer >= memory.layout().ranks || peer == doorbell->index())
    return Status(Code::kInvalidArgument,
                  "no rank " + std::to_string(peer) + " shares the memory");
  Result<std::byte*> block = memory.Pair(doorbell->index(), peer);
  if (!block.ok()) return block.status();
  return std::unique_ptr<Link>(
      std::make_unique<RingLink>(block.value(), doorbell, peer));
}

RingLink::RingLink(std::byte* block, Doorbell* doorbell, int peer)
    : doorbell_(doorbell),
      peer_index_(peer),
      pair_(reinterpret_cast<RingPair*>(block)),
      own_(&pair_->sides[doorbell->index() > peer]),
      peer_(&pair_->sides[doorbell->index() < peer]),
      out_(&pair_->positions[doorbell->index() > peer], Ring(doorbell->index() > peer),
           doorbell->memory()->layout().ring_bytes),
      in_(&pair_->positions[doorbell->index() < peer], Ring(doorbell->index() < peer),
          doorbell->memory()->layout().ring_bytes),
      cma_(&own_->cma, &peer_->cma, &doorbell->words(peer).closed, this) {}

RingLink::~RingLink() { doorbell_->Close(); }

std::byte* RingLink::Ring(int side) const {
  return reinterpret_cast<std::byte*>(pair_) + kPairHeader +
         static_cast<size_t>(side) * doorbell_->memory()->layout().ring_bytes;
}

void RingLink::WakeIf(uint32_t wants) {
  // Pairs with Arm: the caller has stored its progress before this load.
  if ((LoadShared(peer_->wants) & wants) == 0) return;
  // `wants` is cleared, so that a long transfer rings only once. If the peer also waits
  // for the other event, that bit is cleared too, but the peer wakes up in any case.
  const std::atomic_ref<uint32_t> asleep(peer_->wants);
  if (asleep.exchange(0, std::memory_order_seq_cst) != 0)
    doorbell_->RingPeer(peer_index_);
}

void RingLink::PublishWritten() {
  out_.Publish();
  WakeIf(kWantsBytes);
}

void RingLink::PublishRead() {
  in_.Publish();
  WakeIf(kWantsRoom);
}

Status RingLink::WriteState() const {
  if (out_.broken())
    return Status(Code::kUnavailable, "shared memory is damaged: impossible position");
  if (HasPeerClosed()) return Status(Code::kUnavailable, "has closed the link");
  return OkStatus();
}

Status RingLink::ReadState() {
  // Bytes that the peer wrote before it closed must still be delivered. So `closed` is
  // loaded before the position: if `closed` is set, the position is final.
  const bool closed = HasPeerClosed();
  const size_t seen = in_.Available(0);
  const size_t available = in_.Available(seen + 1);
  if (in_.broken())
    return Status(Code::kUnavailable, "shared memory is damaged: impossible position");
  if (closed && available == seen)
    return Status(Code::kUnavailable, "has closed the link");
  return OkStatus();
}

Result<size_t> RingLink::TryWrite(std::span<const iovec> pieces) {
  RJ_TRY(WriteState());
  scant_room_ = 0;
  const size_t moved = MovePieces(
      pieces,
      [this](const std::byte* from, size_t left, size_t limit) {
        const size_t n = std::min({left, limit, out_.Room(left)});
        out_.CopyIn(from, n);
        return n;
      },
      [this] { PublishWritten(); });
  if (moved == 0 && out_.broken()) return WriteState();
  return moved;
}

Result<size_t> RingLink::TryRead(std::span<const iovec> pieces) {
  scant_bytes_ = 0;
  cma_.AwaitsRing();
  bool dry = false;
  const size_t moved = MovePieces(
      pieces,
      [this, &dry](std::byte* to, size_t left, size_t limit) {
        const size_t n = std::min({left, limit, in_.Available(left)});
        in_.CopyOut(to, n);
        dry = n == 0;
        return n;
      },
      [this] { PublishRead(); });
  if (moved > 0)
    cma_.ProbeOnce();
  else if (dry)
    RJ_TRY(ReadState());
  return moved;
}

Result<std::span<std::byte>> RingLink::Reserve(size_t limit, size_t granularity) {
  RJ_TRY(WriteState());
  const std::span<std::byte> room = out_.Reserve(limit, granularity);
  if (room.empty()) RJ_TRY(WriteState());
  scant_room_ = room.empty() ? out_.Room(0) : 0;
  return room;
}

Status RingLink::Commit(size_t bytes) {
  out_.Commit(bytes);
  if (bytes > 0) PublishWritten();
  return OkStatus();
}

Result<std::span<const std::byte>> RingLink::Peek(size_t limit, size_t granularity) {
  cma_.AwaitsRing();
  const std::span<const std::byte> bytes = in_.Peek(limit, granularity);
  scant_bytes_ = bytes.empty() ? in_.Available(0) : 0;
  if (bytes.empty() && limit > 0) RJ_TRY(ReadState());
  return bytes;
}

void RingLink::Consume(size_t bytes) {
  in_.Consume(bytes);
  if (bytes > 0) PublishRead();
}

bool RingLink::Arm(bool want_read, bool want_write, std::vector<pollfd>*) {
  // Pairs with WakeIf: this store precedes the loads of the peer's progress below.
  StoreShared(own_->wants,
              (want_read ? kWantsBytes : 0) | (want_write ? kWantsRoom : 0));
  if (HasPeerClosed()) return true;
  bool ready = false;
  if (want_read)
    ready |= cma_.awaits_exposed() ? cma_.HasExposed()
                                   : in_.Available(scant_bytes_ + 1) > scant_bytes_;
  if (want_write)
    ready |= cma_.outstanding() ? cma_.HasAcknowledged()
                                : out_.Room(scant_room_ + 1) > scant_room_;
  return ready || in_.broken() || out_.broken();
}

void RingLink::Disarm() { StoreShared(own_->wants, uint32_t{0}); }

}  // namespace ringjax
