// Memory of another process of this host, read where it lies: process_vm_readv(2).
//
// Whose memory it is, is the kernel's word and not the peer's: the peer could have this
// process read on its behalf what the peer itself may not read.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <span>

namespace ringjax {

// Which number lies where in a process, as the process says: it tells that the process
// number, which may be given to another process, is still of the one that said so.
struct Proof {
  uint64_t at, number;
};

// Of this process. Where Yama lets only ancestors read (`ptrace_scope` 1), asking for
// it lets the process that started this one, and what descends from it, read, too: the
// other ranks. Not if that is process 1: messages are copied then.
Proof OwnProof();

class ProcessMemory {
 public:
  // pid: as the kernel tells it in the namespace of this process; 0: unknown, and
  // nothing can be read.
  ProcessMemory(pid_t pid, const Proof& proof) : pid_(pid), proof_(proof) {}

  // Whether the memory can be read, and is of the process that gave the proof.
  bool CanRead() const { return Read({}, {}) == 0; }

  // As process_vm_readv: bytes that were read, which may be fewer than wanted; -1 if
  // none can be. At most kMostRead pieces, and the proof is read with them each time.
  ptrdiff_t Read(std::span<const iovec> to, std::span<const iovec> from) const;

 private:
  pid_t pid_;
  Proof proof_;
};
inline constexpr size_t kMostRead = 255;  // and IOV_MAX is 1024

}  // namespace ringjax
