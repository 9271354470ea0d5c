// See host_memory.h.
#include "transport/host_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <string>
#include <system_error>

#include "base/failpoint.h"
#include "transport/ring_link.h"
#include "transport/shared_segment.h"

namespace ringjax {
namespace {

constexpr size_t kPageBytes = 4096;
// With more ranks, a process reads too little of the shared segment to map all of its
// pages in advance.
constexpr int kMostPopulated = 16;

constexpr size_t RoundUp(size_t bytes) {
  return (bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
}

size_t WordsBytes(const HostLayout& layout) {
  return RoundUp(static_cast<size_t>(layout.ranks) * sizeof(HostWords));
}

size_t PairBytes(const HostLayout& layout) {
  return RoundUp(kPairHeader + 2 * layout.ring_bytes);
}

Status Refused(const std::string& what) {
  return Status(Code::kInternal, what + ": " + std::generic_category().message(errno));
}

Status CheckLayout(const HostLayout& layout) {
  if (layout.ranks < 1)
    return Status(Code::kInvalidArgument, "no ranks share the memory");
  if (!IsRingSize(layout.ring_bytes))
    return Status(Code::kInvalidArgument,
                  "a ring's size must be a power of two from 64 on, not " +
                      std::to_string(layout.ring_bytes));
  if (layout.tile_bytes > 0 && !IsTileSize(layout.tile_bytes))
    return Status(Code::kInvalidArgument,
                  "a tile's size must be a multiple of 4096, not " +
                      std::to_string(layout.tile_bytes));
  return OkStatus();
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

// Takes the page faults of a range now and not during the first collectives. A hint,
// which may fail.
void Populate([[maybe_unused]] std::byte* from, [[maybe_unused]] size_t bytes) {
#ifdef MADV_POPULATE_WRITE
  madvise(from, bytes, MADV_POPULATE_WRITE);
#endif
}

}  // namespace

size_t FixedHostBytes(const HostLayout& layout) {
  return WordsBytes(layout) + (layout.tile_bytes > 0
                                   ? SharedSegmentBytes(layout.ranks, layout.tile_bytes)
                                   : 0);
}

size_t HostBytes(const HostLayout& layout) {
  const auto n = static_cast<size_t>(layout.ranks);
  return FixedHostBytes(layout) + n * (n - 1) / 2 * PairBytes(layout);
}

Result<std::shared_ptr<HostMemory>> HostMemory::Map(int memfd,
                                                    const HostLayout& layout) {
  Descriptor file(memfd);
  RJ_TRY(CheckLayout(layout));
  const size_t bytes = HostBytes(layout), fixed = FixedHostBytes(layout);
  RJ_TRY(CheckMemfd(file.get(), bytes));
  RJ_FAILPOINT(kMap);
  void* block = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, memfd, 0);
  if (block == MAP_FAILED) return Refused("shared memory: mmap");
  auto* const start = static_cast<std::byte*>(block);
  madvise(block, fixed, MADV_HUGEPAGE);  // a hint: huge pages cause fewer page faults
  if (layout.ranks <= kMostPopulated) Populate(start, fixed);
  return std::make_shared<HostMemory>(start, layout, file.Release());
}

std::shared_ptr<HostMemory> HostMemory::Local(const HostLayout& layout) {
  RJ_CHECK(CheckLayout(layout).ok(), "a layout that ranks cannot share");
  void* block = mmap(nullptr, HostBytes(layout), PROT_READ | PROT_WRITE,
                     MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  RJ_CHECK(block != MAP_FAILED, "out of memory for ranks of one process");
  return std::make_shared<HostMemory>(static_cast<std::byte*>(block), layout, -1);
}

HostMemory::~HostMemory() { munmap(block_, HostBytes(layout_)); }

std::byte* HostMemory::segment() const { return block_ + WordsBytes(layout_); }

Result<std::byte*> HostMemory::Pair(int one, int other) const {
  const auto low = static_cast<size_t>(std::min(one, other));
  const auto high = static_cast<size_t>(std::max(one, other));
  const size_t bytes = PairBytes(layout_);
  const size_t offset = FixedHostBytes(layout_) + (high * (high - 1) / 2 + low) * bytes;
  RJ_FAILPOINT(kMap);
  // Without this call, an access when no memory is left would raise SIGBUS.
  if (!is_local()) {
    const int error = posix_fallocate(memfd_.get(), static_cast<off_t>(offset),
                                      static_cast<off_t>(bytes));
    if (error != 0)
      return Status(Code::kUnavailable,
                    std::to_string(bytes) +
                        " bytes of shared memory for a pair of ranks: " +
                        std::generic_category().message(error));
  }
  Populate(block_ + offset, bytes);
  return block_ + offset;
}

pid_t HostMemory::ProcessOf(int index) const {
  const pid_t process = std::max(LoadShared(words(index).process), 0);
  if (is_local() || process == 0) return process;
  struct stat info;
  if (fstat(memfd_.get(), &info) != 0) return 0;
  const std::string inode = " " + std::to_string(info.st_ino) + " ";
  std::ifstream maps("/proc/" + std::to_string(process) + "/maps");
  for (std::string line; std::getline(maps, line);)
    if (line.find(inode) != line.npos && line.find("/memfd:") != line.npos)
      return process;
  return 0;
}

}  // namespace ringjax
