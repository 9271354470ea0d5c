// A link over two byte rings in one shared block: the base of "local" and "shm" links.
//
// A side that finds nothing to do marks itself asleep (Arm), looks once more, and polls
// its doorbell. A side that makes progress rings the peer's doorbell only if the peer
// is asleep.
#pragma once

#include <string_view>
#include <vector>

#include "transport/cma.h"
#include "transport/link.h"
#include "transport/ring_buffer.h"

namespace ringjax {

// One side's flags. The side that owns them writes them, but the peer clears `wants`.
struct RingSide {
  alignas(kLineBytes) uint32_t wants;  // events that end the owner's sleep; 0 if awake
  uint32_t closed;
  CmaState cma;
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
  CmaEndpoint* cma() override { return &cma_; }
  bool Arm(bool want_read, bool want_write, std::vector<pollfd>* fds) override;
  void Disarm() override;

 protected:
  // `block` must stay valid until after Close. `peer` is the peer's process id, or 0.
  RingLink(std::byte* block, int side, size_t ring_bytes, pid_t peer);

  // Marks this side as closed and wakes the peer. Destructors of derived classes call
  // Close while the memory and the peer's doorbell are still valid.
  void Close();

 private:
  virtual void RingPeer() = 0;
  void PublishWritten();
  void PublishRead();
  void WakeIf(uint32_t wants) override;
  // Return the state of a direction: ok if bytes may move later, otherwise the reason
  // why no byte will move any more.
  Status WriteState() const;
  Status ReadState();

  RingPair* pair_;
  RingSide* own_;
  RingSide* peer_;
  RingWriter out_;
  RingReader in_;
  CmaEndpoint cma_;
  // The bytes that Peek found, and the room that Reserve found, if they were less than
  // one element. Arm ignores these bytes, so that the caller may sleep.
  size_t scant_bytes_ = 0;
  size_t scant_room_ = 0;
};

}  // namespace ringjax
