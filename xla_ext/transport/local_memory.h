// The memory that the links or shared segments of one process share if its threads act
// as ranks, and the doorbell of each rank. The last end that is destroyed frees the
// memory. Ring and Forget may be called from any thread.
#pragma once

#include <cstdlib>
#include <cstring>
#include <mutex>
#include <vector>

#include "transport/link.h"

namespace ringjax {

class LocalMemory {
 public:
  LocalMemory(size_t bytes, std::vector<Doorbell*> doorbells)
      : block_(static_cast<std::byte*>(std::aligned_alloc(kPage, RoundUp(bytes)))),
        doorbells_(std::move(doorbells)) {
    RJ_CHECK(block_ != nullptr, "out of memory for ranks of one process");
    std::memset(block_, 0, bytes);
  }
  ~LocalMemory() { std::free(block_); }
  LocalMemory(const LocalMemory&) = delete;
  LocalMemory& operator=(const LocalMemory&) = delete;

  std::byte* block() const { return block_; }
  void Ring(int rank) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (Doorbell* bell = doorbells_[static_cast<size_t>(rank)]) bell->Ring();
  }
  // Makes Ring(rank) do nothing, so that the doorbell of `rank` may be destroyed.
  void Forget(int rank) {
    const std::lock_guard<std::mutex> lock(mutex_);
    doorbells_[static_cast<size_t>(rank)] = nullptr;
  }

 private:
  static constexpr size_t kPage = 4096;
  // std::aligned_alloc requires a size that is a multiple of the alignment.
  static size_t RoundUp(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

  std::byte* block_;
  std::mutex mutex_;
  std::vector<Doorbell*> doorbells_;
};

}  // namespace ringjax
