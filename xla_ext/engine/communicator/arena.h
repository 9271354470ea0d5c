// Arena: memory of a fixed size for what is given back in the order it was taken in.
//
// A ring in virtual memory: the same pages are mapped twice, one after the other, so
// that a block which runs over the end is contiguous all the same, and every byte can
// be used. Pages stay, so that only the first round faults them in. Not for threads.
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

  // Grows to `bytes`, unless something is taken: then it stays as it is.
  void Grow(uint64_t bytes);

  // A block, or null if there is no room for one or `bytes` is 0. A block that is given
  // back before an older one is room again only after that one.
  std::byte* Take(uint64_t bytes);
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
  uint64_t next_ = 0, taken_ = 0;  // where the next block begins; bytes of blocks_
  std::deque<Block> blocks_;       // the oldest first
};

}  // namespace ringjax
