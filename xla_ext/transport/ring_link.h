// A link over two byte rings in the memory of a host: a "shm" link, or a "local" link
// between threads.
//
// A side that finds nothing to do marks itself asleep (Arm), looks once more, and polls
// its doorbell. A side that makes progress rings the peer's doorbell only if the peer
// is asleep.
#pragma once

#include <string_view>
#include <vector>

#include "transport/cma.h"
#include "transport/doorbell.h"
#include "transport/link.h"
#include "transport/ring_buffer.h"

namespace ringjax {

// One side's flags. The side that owns them writes them, but the peer clears `wants`.
struct RingSide {
  alignas(kLineBytes) uint32_t wants;  // events that end the owner's sleep; 0 if awake
  CmaState cma;
};
inline constexpr uint32_t kWantsBytes = 1;
inline constexpr uint32_t kWantsRoom = 2;

// The start of the memory of a pair; the two rings follow after kPairHeader bytes. Ring
// s is written by side s.
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

class RingLink final : public Link, private Waker {
 public:
  // `block` is the memory of the pair (HostMemory::Pair), in the memory of the
  // doorbell.
  RingLink(std::byte* block, Doorbell* doorbell, int peer);
  ~RingLink() override;

  std::string_view transport() const override {
    return doorbell_->memory()->is_local() ? "local" : "shm";
  }
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

 private:
  bool HasPeerClosed() const {
    return LoadShared(doorbell_->words(peer_index_).closed) != 0;
  }
  std::byte* Ring(int side) const;  // the ring that a side writes
  void PublishWritten();
  void PublishRead();
  void WakeIf(uint32_t wants) override;
  pid_t Process() const override { return doorbell_->memory()->ProcessOf(peer_index_); }
  // Return the state of a direction: ok if bytes may move later, otherwise the reason
  // why no byte will move any more.
  Status WriteState() const;
  Status ReadState();

  Doorbell* const doorbell_;
  const int peer_index_;
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
