// Links and shared segments within one process, whose threads act as ranks. These links
// and segments run the same code as those between processes, so that sanitizers can
// check that code; only the origin of the memory differs.
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <mutex>

#include "transport/ring_link.h"
#include "transport/shared_segment.h"

namespace ringjax {
namespace {

// The memory that the ends share, and the doorbell of each rank. The last end that is
// destroyed frees the memory. Ring and Forget may be called from any thread.
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

class LocalLink final : public RingLink {
 public:
  LocalLink(std::shared_ptr<LocalMemory> pair, int side, size_t ring_bytes)
      : RingLink(pair->block(), side, ring_bytes, getpid()),
        pair_(std::move(pair)),
        side_(side) {}
  ~LocalLink() override {
    Close();
    pair_->Forget(side_);
  }
  std::string_view transport() const override { return "local"; }

 private:
  void RingPeer() override { pair_->Ring(1 - side_); }

  std::shared_ptr<LocalMemory> pair_;
  int side_;
};

class LocalSegment final : public SharedSegment {
 public:
  LocalSegment(std::shared_ptr<LocalMemory> memory, int rank, int size,
               size_t tile_bytes)
      : SharedSegment(memory->block(), rank, size, tile_bytes),
        memory_(std::move(memory)) {}
  ~LocalSegment() override {
    Close();
    memory_->Forget(rank());
  }

 private:
  void RingPeer(int rank) override { memory_->Ring(rank); }

  std::shared_ptr<LocalMemory> memory_;
};

}  // namespace

std::pair<std::unique_ptr<Link>, std::unique_ptr<Link>> MakeLocalLinks(
    size_t ring_bytes, Doorbell* doorbell0, Doorbell* doorbell1) {
  RJ_CHECK(IsRingSize(ring_bytes), "a ring's size must be a power of two from 64 on");
  auto pair = std::make_shared<LocalMemory>(ShmBytes(ring_bytes),
                                            std::vector{doorbell0, doorbell1});
  return {std::make_unique<LocalLink>(pair, 0, ring_bytes),
          std::make_unique<LocalLink>(pair, 1, ring_bytes)};
}

std::vector<std::unique_ptr<SharedSegment>> MakeLocalSegments(
    size_t tile_bytes, const std::vector<Doorbell*>& doorbells) {
  RJ_CHECK(IsTileSize(tile_bytes), "a tile's size must be a multiple of 4096");
  const int size = static_cast<int>(doorbells.size());
  auto memory =
      std::make_shared<LocalMemory>(SharedSegmentBytes(size, tile_bytes), doorbells);
  std::vector<std::unique_ptr<SharedSegment>> segments;
  for (int r = 0; r < size; ++r)
    segments.push_back(std::make_unique<LocalSegment>(memory, r, size, tile_bytes));
  return segments;
}

}  // namespace ringjax
