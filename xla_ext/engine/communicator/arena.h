// Arena: memory for blocks, which are reused in the order in which they were taken.
//
// The arena is a ring buffer whose pages are mapped twice, at adjacent addresses. So a
// block that runs past the end of the first mapping is contiguous, and every byte can
// be used. Pages stay mapped, so only their first use causes page faults. Not
// thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>

namespace ringjax {

class Arena {
 public:
  Arena() = default;
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // Grows to `bytes`, rounded up to pages. Does nothing while any block is taken, or if
  // the arena is large enough. The size becomes 0 if the system has no memory.
  void Grow(uint64_t bytes);

  // Takes a block from the arena. Returns null if there is no room or `bytes` is 0.
  std::byte* Take(uint64_t bytes);
  // Returns a block to the arena, which reuses it once all older blocks are returned.
  void Give(const std::byte* block);

  uint64_t size() const { return size_; }

 private:
  struct Block {
    std::byte* at;
    uint64_t bytes;
    bool free;
  };

  void Unmap();

  std::byte* memory_ = nullptr;
  uint64_t size_ = 0;
  uint64_t next_ = 0, taken_ = 0;  // offset of the next block; bytes of blocks_
  std::deque<Block> blocks_;       // oldest first
};

}  // namespace ringjax
