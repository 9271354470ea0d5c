// Rings in the memory of one process, for threads as ranks. The same code as shared
// memory, so that sanitizers see it; only where the memory comes from differs.
#include <cstdlib>
#include <cstring>
#include <mutex>

#include "transport/ring_link.h"

namespace ringjax {
namespace {

// What the two ends share. The last one to go frees it.
class LocalPair {
 public:
  LocalPair(size_t ring_bytes, Doorbell* doorbell0, Doorbell* doorbell1)
      : block_(
            static_cast<std::byte*>(std::aligned_alloc(kPairHeader, Size(ring_bytes)))),
        doorbells_{doorbell0, doorbell1} {
    RJ_CHECK(block_ != nullptr, "out of memory for a ring");
    std::memset(block_, 0, Size(ring_bytes));
  }
  ~LocalPair() { std::free(block_); }
  LocalPair(const LocalPair&) = delete;
  LocalPair& operator=(const LocalPair&) = delete;

  std::byte* block() const { return block_; }

  void Ring(int side) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (doorbells_[side] != nullptr) doorbells_[side]->Ring();
  }
  // After this the doorbell of `side` may be destroyed.
  void Forget(int side) {
    const std::lock_guard<std::mutex> lock(mutex_);
    doorbells_[side] = nullptr;
  }

 private:
  // aligned_alloc wants a multiple of the alignment.
  static size_t Size(size_t ring_bytes) {
    return (ShmBytes(ring_bytes) + kPairHeader - 1) / kPairHeader * kPairHeader;
  }

  std::byte* block_;
  std::mutex mutex_;
  Doorbell* doorbells_[2];
};

class LocalLink final : public RingLink {
 public:
  LocalLink(std::shared_ptr<LocalPair> pair, int side, size_t ring_bytes)
      : RingLink(pair->block(), side, ring_bytes),
        pair_(std::move(pair)),
        side_(side) {}
  ~LocalLink() override {
    Close();
    pair_->Forget(side_);
  }
  std::string_view transport() const override { return "local"; }

 private:
  void RingPeer() override { pair_->Ring(1 - side_); }

  std::shared_ptr<LocalPair> pair_;
  int side_;
};

}  // namespace

std::pair<std::unique_ptr<Link>, std::unique_ptr<Link>> MakeLocalLinks(
    size_t ring_bytes, Doorbell* doorbell0, Doorbell* doorbell1) {
  RJ_CHECK(IsRingSize(ring_bytes), "a ring's size must be a power of two from 64 on");
  auto pair = std::make_shared<LocalPair>(ring_bytes, doorbell0, doorbell1);
  return {std::make_unique<LocalLink>(pair, 0, ring_bytes),
          std::make_unique<LocalLink>(pair, 1, ring_bytes)};
}

}  // namespace ringjax
