// The memory that the ranks of a communicator on one host share.
//
// The lowest of these ranks creates one memfd, and all of them map it. It holds words
// of each rank, the shared segment if the communicator has one (shared_segment.h), and
// the rings of each pair of ranks (ring_link.h). The pages of a pair's rings are
// allocated when the pair first uses them, so that the memory grows with the pairs that
// exchange data and not with the square of the ranks.
//
// A rank is known here by its index among the ranks that share the memory.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/status.h"
#include "transport/descriptor.h"
#include "transport/ring_buffer.h"

namespace ringjax {

// The words of one rank. Zeros are valid. Only this rank writes them, but every rank
// adds to `rings`.
struct HostWords {
  alignas(kLineBytes) uint32_t rings;  // how often the rank was woken (doorbell.h)
  uint32_t asleep;                     // a value of Doorbell::Asleep
  uint32_t closed;                     // 1: the rank uses the memory no more
  int32_t process;                     // the process id of the rank, as it says
  uint32_t core;         // 1 + the core of the rank in a long wait (cpu_placement.h)
  uint32_t reads_beats;  // 1: the rank looks for beats here (heartbeat/shared_beats.h)
  uint64_t beats;        // the beats of the rank so far
  uint64_t entered[2];   // ControlMessage::entered at the last beat
};

struct HostLayout {
  int ranks = 1;
  size_t ring_bytes = 0;  // a ring of a pair; see IsRingSize
  size_t tile_bytes = 0;  // a tile of the shared segment; 0 means no segment
};

// Returns the bytes of the memory; of them, the first FixedHostBytes are allocated when
// the memory is created.
size_t HostBytes(const HostLayout& layout);
size_t FixedHostBytes(const HostLayout& layout);

class HostMemory {
 public:
  // Maps a memfd, of which it takes ownership, even on failure. The creator must have
  // given it HostBytes(layout) bytes and sealed it; otherwise fails with
  // kInvalidArgument.
  static Result<std::shared_ptr<HostMemory>> Map(int memfd, const HostLayout& layout);
  // Makes memory for ranks that are threads of this process (tests, sanitizers).
  static std::shared_ptr<HostMemory> Local(const HostLayout& layout);

  HostMemory(std::byte* block, const HostLayout& layout, int memfd)
      : block_(block), layout_(layout), memfd_(memfd) {}
  ~HostMemory();
  HostMemory(const HostMemory&) = delete;
  HostMemory& operator=(const HostMemory&) = delete;

  const HostLayout& layout() const { return layout_; }
  bool is_local() const { return memfd_.get() < 0; }

  HostWords& words(int index) const {
    return reinterpret_cast<HostWords*>(block_)[index];
  }
  std::byte* segment() const;  // requires layout().tile_bytes > 0
  // Allocates the memory of a pair of ranks, and returns it. Fails with kUnavailable if
  // the host has no memory left.
  Result<std::byte*> Pair(int one, int other) const;

  // Returns the process id of a rank in the PID namespace of this process; 0 if it is
  // unknown. The rank itself says which process it is. So the memory map of the process
  // must contain this memory, which only ranks of the job have: a rank cannot make this
  // process read the memory of a process of its choice.
  pid_t ProcessOf(int index) const;

 private:
  std::byte* const block_;
  const HostLayout layout_;
  const Descriptor memfd_;
};

}  // namespace ringjax
