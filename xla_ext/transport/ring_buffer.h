// A byte ring between one writer and one reader that share memory, possibly mapped at
// different addresses. The data and the two positions are in the shared block; all
// other state is private to a side.
//
// The other side may be broken or hostile. So a position from shared memory is checked
// before it is used, and a side never reads back its own position. One thread uses a
// side at a time. No function sleeps; RingLink (ring_link.h) does the waiting.
// Lamport, "Proving the correctness of multiprocess programs", IEEE TSE 3(2), 1977. The
// private copies of positions follow Lee et al., "MCRingBuffer", IPDPS 2010.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>

#include "transport/adaptive_copier.h"
#include "transport/copy.h"

namespace ringjax {

// The alignment of shared words: two cache lines, because processors prefetch in pairs.
inline constexpr size_t kLineBytes = 128;
inline constexpr size_t kMaxGranularity = 16;

// The shared positions of a ring. Zeros are a valid, empty ring.
struct RingPositions {
  alignas(kLineBytes) uint64_t written;  // bytes written so far; the writer stores it
  alignas(kLineBytes) uint64_t read;     // bytes read so far; the reader stores it
};

// Load and store shared words, always seq_cst, so that no wake-up is lost. A side that
// makes progress stores its position (Publish) and then loads the peer's `wants`
// (RingLink::WakeIf). A side that goes to sleep stores `wants` and then loads the
// position (RingLink::Arm). In the total order of the four accesses, at least one side
// loads after the other's store. With release and acquire both could load too early.
template <typename T>
T LoadShared(T& word) {
  return std::atomic_ref<T>(word).load(std::memory_order_seq_cst);
}
template <typename T>
void StoreShared(T& word, T value) {
  std::atomic_ref<T>(word).store(value, std::memory_order_seq_cst);
}
static_assert(std::atomic_ref<uint64_t>::is_always_lock_free);
static_assert(std::atomic_ref<uint32_t>::is_always_lock_free);

// One side of a ring: its position, and its copy of the other side's position.
class RingEnd {
 public:
  RingEnd(RingPositions* shared, std::byte* data, size_t capacity)
      : shared_(shared), data_(data), capacity_(capacity) {}

  // Whether the other side has published an impossible position, so that no bytes move.
  bool broken() const { return broken_; }

 protected:
  // Bytes from this side's position to the end of the data area.
  size_t ToWrap() const { return capacity_ - Index(); }
  size_t Index() const { return static_cast<size_t>(position_) & (capacity_ - 1); }

  // Returns the length of the contiguous region at this side's position: at most
  // `usable` and `limit`, a multiple of `granularity`, and 0 if not even one element is
  // contiguous.
  size_t Contiguous(size_t usable, size_t limit, size_t granularity) const {
    return std::min({usable, limit, ToWrap()}) & ~(granularity - 1);
  }

  RingPositions* shared_;
  std::byte* data_;
  size_t capacity_;        // a power of two
  uint64_t position_ = 0;  // this side's position; the shared word is a copy of it
  uint64_t other_ = 0;     // the other side's position, as last accepted
  bool broken_ = false;
  // Holds an element that lies partly at the end and partly at the start of the data
  // area, because the sizes of earlier messages were not multiples of its size.
  alignas(kMaxGranularity) std::byte bounce_[kMaxGranularity];
  bool bounced_ = false;
};

class RingWriter : public RingEnd {
 public:
  using RingEnd::RingEnd;

  // Returns how many bytes can be written. Loads the reader's position first if, as far
  // as this side knows, fewer than `wanted` bytes can be written.
  size_t Room(size_t wanted) {
    if (capacity_ - static_cast<size_t>(position_ - other_) < wanted) Refresh();
    return broken_ ? 0 : capacity_ - static_cast<size_t>(position_ - other_);
  }

  // Copies `bytes` <= Room() bytes into the ring.
  void CopyIn(const void* from, size_t bytes) {
    const size_t before_wrap = std::min(bytes, ToWrap());
    copier_.Copy(data_ + Index(), from, before_wrap);
    if (bytes > before_wrap)
      copier_.Copy(data_, static_cast<const std::byte*>(from) + before_wrap,
                   bytes - before_wrap);
    position_ += bytes;
  }

  std::span<std::byte> Reserve(size_t limit, size_t granularity) {
    const size_t room = Room(limit);
    bounced_ = false;
    if (room < granularity || limit < granularity) return {};
    const size_t bytes = Contiguous(room, limit, granularity);
    if (bytes > 0) return {data_ + Index(), bytes};
    bounced_ = true;
    return {bounce_, granularity};
  }
  void Commit(size_t bytes) {
    if (bounced_) {
      CopyIn(bounce_, bytes);
    } else {
      position_ += bytes;
    }
    bounced_ = false;
  }

  // Makes the bytes written so far visible to the reader.
  void Publish() { StoreShared(shared_->written, position_); }

 private:
  void Refresh() {
    const uint64_t read = LoadShared(shared_->read);
    // A valid new position of the reader lies between its last position and the
    // writer's.
    if (read - other_ > position_ - other_) {
      broken_ = true;
    } else {
      other_ = read;
    }
  }

  AdaptiveCopier copier_;
};

class RingReader : public RingEnd {
 public:
  using RingEnd::RingEnd;

  // Returns how many bytes can be read. Loads the writer's position first if, as far as
  // this side knows, fewer than `wanted` bytes can be read.
  size_t Available(size_t wanted) {
    if (static_cast<size_t>(other_ - position_) < wanted) Refresh();
    return broken_ ? 0 : static_cast<size_t>(other_ - position_);
  }

  // Copies `bytes` <= Available() bytes out of the ring.
  void CopyOut(void* to, size_t bytes) {
    Extract(to, bytes);
    position_ += bytes;
  }

  std::span<const std::byte> Peek(size_t limit, size_t granularity) {
    const size_t available = Available(limit);
    if (available < granularity || limit < granularity) return {};
    const size_t bytes = Contiguous(available, limit, granularity);
    if (bytes > 0) return {data_ + Index(), bytes};
    Extract(bounce_, granularity);
    return {bounce_, granularity};
  }
  void Consume(size_t bytes) { position_ += bytes; }

  // Lets the writer reuse the room of the bytes that were read.
  void Publish() { StoreShared(shared_->read, position_); }

 private:
  void Extract(void* to, size_t bytes) const {
    const size_t before_wrap = std::min(bytes, ToWrap());
    CopyBytes(to, data_ + Index(), before_wrap);
    if (bytes > before_wrap)
      CopyBytes(static_cast<std::byte*>(to) + before_wrap, data_, bytes - before_wrap);
  }
  void Refresh() {
    const uint64_t written = LoadShared(shared_->written);
    // A valid new position of the writer lies between its last position and the
    // reader's position plus one full ring.
    const uint64_t seen = other_ - position_;
    const uint64_t ahead = written - position_;
    if (ahead < seen || ahead > capacity_) {
      broken_ = true;
    } else {
      other_ = written;
    }
  }
};

}  // namespace ringjax
