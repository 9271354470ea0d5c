// A byte ring between one writer and one reader who share memory, perhaps at different
// addresses: the positions live in the shared block, everything else is private.
//
// The other side may be broken or hostile: nothing read from shared memory is used
// before it is known to be possible, and the own position is never read back. Not for
// more than one thread per side, and nothing here sleeps: see ring_link.h.
// Lamport, "Proving the correctness of multiprocess programs", IEEE TSE 3(2), 1977; the
// cached positions follow Lee et al., "MCRingBuffer", IPDPS 2010.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>

#include "transport/copy.h"
#include "transport/write_pace.h"

namespace ringjax {

// Two lines, because processors prefetch them in pairs.
inline constexpr size_t kLineBytes = 128;
inline constexpr size_t kMaxGranularity = 16;

// What both sides see. Zeros are a valid, empty ring.
struct RingPositions {
  alignas(kLineBytes) uint64_t written;  // bytes ever written, by the writer only
  alignas(kLineBytes) uint64_t read;     // bytes ever read, by the reader only
};

// seq_cst throughout: a side publishes its position and then looks whether the other
// sleeps, while the other marks itself asleep and then looks at the position. In one
// order of all four, at least one of them sees the other.
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

// The memory of a ring and one side's position in it.
class RingEnd {
 public:
  RingEnd(RingPositions* shared, std::byte* data, size_t capacity)
      : shared_(shared), data_(data), capacity_(capacity) {}

  // The other side claimed an impossible position. Its bytes are no longer used.
  bool broken() const { return broken_; }

 protected:
  // Bytes from the own position to the end of the memory.
  size_t ToWrap() const { return capacity_ - Index(); }
  size_t Index() const { return static_cast<size_t>(position_) & (capacity_ - 1); }

  // The largest contiguous piece of `usable` bytes that the limit and the granularity
  // allow; 0 if not even one element is contiguous.
  size_t Contiguous(size_t usable, size_t limit, size_t granularity) const {
    return std::min({usable, limit, ToWrap()}) & ~(granularity - 1);
  }

  RingPositions* shared_;
  std::byte* data_;
  size_t capacity_;        // a power of two
  uint64_t position_ = 0;  // own, the truth
  uint64_t other_ = 0;     // the other side's, as last seen
  bool broken_ = false;
  // An element that straddles the wrap, because odd sizes went before it.
  alignas(kMaxGranularity) std::byte bounce_[kMaxGranularity];
  bool bounced_ = false;
};

class RingWriter : public RingEnd {
 public:
  using RingEnd::RingEnd;

  // How many bytes can be written; looks at the reader only if fewer than `wanted`.
  size_t Room(size_t wanted) {
    if (capacity_ - static_cast<size_t>(position_ - other_) < wanted) Refresh();
    return broken_ ? 0 : capacity_ - static_cast<size_t>(position_ - other_);
  }

  // bytes <= Room().
  void CopyIn(const void* from, size_t bytes) {
    const size_t before_wrap = std::min(bytes, ToWrap());
    pace_.Copy(data_ + Index(), from, before_wrap);
    if (bytes > before_wrap)
      pace_.Copy(data_, static_cast<const std::byte*>(from) + before_wrap,
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

  // Shows the reader what was written.
  void Publish() { StoreShared(shared_->written, position_); }

 private:
  void Refresh() {
    const uint64_t read = LoadShared(shared_->read);
    // Between what we saw before and what we wrote.
    if (read - other_ > position_ - other_) {
      broken_ = true;
    } else {
      other_ = read;
    }
  }

  WritePace pace_;
};

class RingReader : public RingEnd {
 public:
  using RingEnd::RingEnd;

  // How many bytes can be read; looks at the writer only if fewer than `wanted`.
  size_t Available(size_t wanted) {
    if (static_cast<size_t>(other_ - position_) < wanted) Refresh();
    return broken_ ? 0 : static_cast<size_t>(other_ - position_);
  }

  // bytes <= Available().
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

  // Lets the writer reuse what was read.
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
    // Between what we saw before and one full ring ahead of us.
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
