// Links within one process, whose threads act as ranks. They run the same code as links
// over shared memory, so that sanitizers can check that code; only the origin of the
// memory differs.
#include <unistd.h>

#include "transport/local_memory.h"
#include "transport/ring_link.h"

namespace ringjax {
namespace {

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

}  // namespace

std::pair<std::unique_ptr<Link>, std::unique_ptr<Link>> MakeLocalLinks(
    size_t ring_bytes, Doorbell* doorbell0, Doorbell* doorbell1) {
  RJ_CHECK(IsRingSize(ring_bytes), "a ring's size must be a power of two from 64 on");
  auto pair = std::make_shared<LocalMemory>(ShmBytes(ring_bytes),
                                            std::vector{doorbell0, doorbell1});
  return {std::make_unique<LocalLink>(pair, 0, ring_bytes),
          std::make_unique<LocalLink>(pair, 1, ring_bytes)};
}

}  // namespace ringjax
