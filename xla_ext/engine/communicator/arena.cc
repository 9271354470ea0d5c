// Implements Arena: maps its memory twice, and takes and returns blocks. See arena.h.
#include "engine/communicator/arena.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>

namespace ringjax {
namespace {

// Maps `bytes` of memory, whole pages, into both halves of a range of 2 * bytes of
// addresses. Returns null if the system has no memory or no memfd.
std::byte* MapTwice(uint64_t bytes) {
  const int file = memfd_create("ringjax-arena", MFD_CLOEXEC);
  if (file < 0) return nullptr;
  constexpr int kAccess = PROT_READ | PROT_WRITE;
  void* both = MAP_FAILED;
  if (ftruncate(file, static_cast<off_t>(bytes)) == 0)
    both = mmap(nullptr, 2 * bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  bool mapped = both != MAP_FAILED;
  for (uint64_t half = 0; mapped && half < 2; ++half) {
    void* at = static_cast<std::byte*>(both) + half * bytes;
    mapped = mmap(at, bytes, kAccess, MAP_SHARED | MAP_FIXED, file, 0) != MAP_FAILED;
  }
  close(file);
  if (mapped) return static_cast<std::byte*>(both);
  if (both != MAP_FAILED) munmap(both, 2 * bytes);
  return nullptr;
}

}  // namespace

Arena::~Arena() { Unmap(); }

void Arena::Unmap() {
  if (memory_) munmap(memory_, 2 * size_);
  memory_ = nullptr;
  size_ = next_ = 0;
}

void Arena::Grow(uint64_t bytes) {
  if (bytes <= size_ || !blocks_.empty()) return;
  const uint64_t page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  Unmap();
  bytes = (bytes + page - 1) / page * page;
  memory_ = MapTwice(bytes);
  if (memory_) size_ = bytes;
}

std::byte* Arena::Take(uint64_t bytes) {
  if (bytes == 0 || bytes > size_ - taken_) return nullptr;
  std::byte* at = memory_ + next_;
  blocks_.push_back({at, bytes, false});
  taken_ += bytes;
  next_ = (next_ + bytes) % size_;
  return at;
}

void Arena::Give(const std::byte* block) {
  const auto found = std::find_if(blocks_.begin(), blocks_.end(), [=](const Block& b) {
    return b.at == block && !b.free;
  });
  if (found != blocks_.end()) found->free = true;
  while (!blocks_.empty() && blocks_.front().free) {
    taken_ -= blocks_.front().bytes;
    blocks_.pop_front();
  }
  // An empty arena starts at offset 0 again, so a training step that needs less than
  // the whole arena touches fewer pages.
  if (blocks_.empty()) next_ = 0;
}

}  // namespace ringjax
