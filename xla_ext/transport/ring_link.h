// A link over two byte rings in one shared block: what local and shm have in common.
//
// Who finds nothing to do marks itself asleep (Arm), looks once more, and polls its
// doorbell; who makes progress rings the other's doorbell only if it is asleep.
#pragma once

#include <string_view>
#include <vector>

#include "transport/link.h"
#include "transport/loans.h"
#include "transport/ring_buffer.h"

namespace ringjax {

// One side's flags. Written by its owner, except that the other clears `wants`.
struct RingSide {
  alignas(kLineBytes) uint32_t wants;  // asleep until one of these comes: see below
  uint32_t closed;
  LoanSide loans;
};
inline constexpr uint32_t kWantsBytes = 1;
inline constexpr uint32_t kWantsRoom = 2;

// The start of a shared block; the two rings follow after kPairHeader bytes. Ring s is
// written by side s.
struct RingPair {
  RingPositions positions[2];
  RingSide sides[2];
};
inline constexpr size_t kPairHeader = 4096;
static_assert(sizeof(RingPair) <= kPairHeader);

inline constexpr size_t kMinRing = 64;
inline constexpr size_t kMaxRing = size_t{1} << 30;
constexpr bool IsRingSize(size_t bytes) {
  return bytes >= kMinRing && bytes <= kMaxRing && (bytes & (bytes - 1)) == 0;
}

class RingLink : public Link, private Waker {
 public:
  Result<size_t> TryWrite(std::span<const iovec> pieces) override;
  Result<size_t> TryRead(std::span<const iovec> pieces) override;
  Result<std::span<std::byte>> Reserve(size_t limit, size_t granularity) override;
  Status Commit(size_t bytes) override;
  Result<std::span<const std::byte>> Peek(size_t limit, size_t granularity) override;
  void Consume(size_t bytes) override;
  Result<bool> Flush() override { return true; }
  Loans* loans() override { return &loans_; }
  bool Arm(bool want_read, bool want_write, std::vector<pollfd>* fds) override;
  void Disarm() override;

 protected:
  // `block` must stay until after Close. `peer`: the process of the other side.
  RingLink(std::byte* block, int side, size_t ring_bytes, pid_t peer);

  // Tells the peer that this side is gone; destructors of derived classes call it
  // while the memory and the peer's doorbell are still there.
  void Close();

 private:
  virtual void RingPeer() = 0;
  void PublishWritten();
  void PublishRead();
  void WakeIf(uint32_t wants) override;
  // Why nothing moves in a direction: nothing yet (ok), or for ever.
  Status WriteState() const;
  Status ReadState();

  RingPair* pair_;
  RingSide* mine_;
  RingSide* peer_;
  RingWriter out_;
  RingReader in_;
  Loans loans_;
  // Less than one element was there when Peek or Reserve gave up: not worth waking for.
  size_t scant_bytes_ = 0;
  size_t scant_room_ = 0;
};

}  // namespace ringjax
