// Links and shared segments in a memfd that several processes map. The process that
// creates the memfd sets its size, allocates its pages (posix_fallocate) and seals it.
// Each process checks the size and the seals before it maps the memfd.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <string>
#include <system_error>
#include <utility>

#include "base/failpoint.h"
#include "transport/descriptor.h"
#include "transport/ring_link.h"
#include "transport/shared_segment.h"

namespace ringjax {
namespace {

class ShmLink final : public RingLink {
 public:
  ShmLink(std::byte* block, int side, size_t ring_bytes, pid_t peer,
          std::unique_ptr<Doorbell> peer_doorbell)
      : RingLink(block, side, ring_bytes, peer),
        block_(block),
        bytes_(ShmBytes(ring_bytes)),
        peer_doorbell_(std::move(peer_doorbell)) {}
  ~ShmLink() override {
    Close();
    munmap(block_, bytes_);
  }
  std::string_view transport() const override { return "shm"; }

 private:
  void RingPeer() override { peer_doorbell_->Ring(); }

  std::byte* block_;
  size_t bytes_;
  std::unique_ptr<Doorbell> peer_doorbell_;
};

Status Refused(const std::string& what) {
  return Status(Code::kInternal, what + ": " + std::generic_category().message(errno));
}

// Checks that the memfd has `bytes` bytes and can never be resized. If a peer could
// shrink the memfd, later accesses would raise SIGBUS.
Status CheckMemfd(int memfd, size_t bytes) {
  struct stat info;
  if (fstat(memfd, &info) != 0) return Refused("shared memory: fstat");
  if (info.st_size < 0 || static_cast<size_t>(info.st_size) != bytes)
    return Status(Code::kInvalidArgument,
                  "shared memory has " + std::to_string(info.st_size) +
                      " bytes, expected " + std::to_string(bytes));
  const int seals = fcntl(memfd, F_GET_SEALS);
  constexpr int kNeeded = F_SEAL_SHRINK | F_SEAL_GROW;
  if (seals < 0 || (seals & kNeeded) != kNeeded)
    return Status(Code::kInvalidArgument,
                  "shared memory is not sealed against resizing");
  return OkStatus();
}

Result<std::byte*> Map(const Descriptor& memfd, size_t bytes) {
  RJ_TRY(CheckMemfd(memfd.get(), bytes));
  RJ_FAILPOINT(kMap);
  void* block =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, memfd.get(), 0);
  if (block == MAP_FAILED) return Refused("shared memory: mmap");
  // Hints, which may fail. Huge pages cause fewer page faults, and MADV_POPULATE_WRITE
  // takes the page faults now and not during the first collectives.
  madvise(block, bytes, MADV_HUGEPAGE);
#ifdef MADV_POPULATE_WRITE
  madvise(block, bytes, MADV_POPULATE_WRITE);
#endif
  return static_cast<std::byte*>(block);
}

class ShmSegment final : public SharedSegment {
 public:
  ShmSegment(std::byte* block, int rank, size_t tile_bytes,
             std::vector<std::unique_ptr<Doorbell>> doorbells)
      : SharedSegment(block, rank, static_cast<int>(doorbells.size()), tile_bytes),
        block_(block),
        doorbells_(std::move(doorbells)) {}
  ~ShmSegment() override {
    Close();
    munmap(block_, SharedSegmentBytes(size(), tile_bytes()));
  }

 private:
  void RingPeer(int rank) override { doorbells_[static_cast<size_t>(rank)]->Ring(); }

  std::byte* block_;
  std::vector<std::unique_ptr<Doorbell>> doorbells_;
};

}  // namespace

size_t ShmBytes(size_t ring_bytes) { return kPairHeader + 2 * ring_bytes; }

Result<std::unique_ptr<Link>> MakeShmLink(int memfd, int side, size_t ring_bytes,
                                          int peer_doorbell, pid_t peer) {
  const Descriptor file(memfd);
  auto doorbell = std::make_unique<Doorbell>(peer_doorbell);
  if (side != 0 && side != 1)
    return Status(Code::kInvalidArgument, "a shared memory link has sides 0 and 1");
  if (!IsRingSize(ring_bytes))
    return Status(Code::kInvalidArgument,
                  "a ring's size must be a power of two from 64 on, not " +
                      std::to_string(ring_bytes));
  Result<std::byte*> block = Map(file, ShmBytes(ring_bytes));
  if (!block.ok()) return block.status();
  return std::unique_ptr<Link>(std::make_unique<ShmLink>(
      block.value(), side, ring_bytes, peer, std::move(doorbell)));
}

Result<std::unique_ptr<SharedSegment>> MakeShmSegment(
    int memfd, int rank, size_t tile_bytes, const std::vector<int>& doorbells) {
  const Descriptor file(memfd);
  std::vector<std::unique_ptr<Doorbell>> bells;
  for (const int fd : doorbells) bells.push_back(std::make_unique<Doorbell>(fd));
  const int size = static_cast<int>(bells.size());
  if (rank < 0 || rank >= size)
    return Status(Code::kInvalidArgument,
                  "a shared segment has no rank " + std::to_string(rank));
  if (!IsTileSize(tile_bytes))
    return Status(
        Code::kInvalidArgument,
        "a tile's size must be a multiple of 4096, not " + std::to_string(tile_bytes));
  Result<std::byte*> block = Map(file, SharedSegmentBytes(size, tile_bytes));
  if (!block.ok()) return block.status();
  return std::unique_ptr<SharedSegment>(
      std::make_unique<ShmSegment>(block.value(), rank, tile_bytes, std::move(bells)));
}

}  // namespace ringjax
