// The memory of another process of this host, read with process_vm_readv(2).
//
// The process id must be verified (HostMemory::ProcessOf). A peer that could choose the
// process id could make this process read, on the peer's behalf, memory that the peer
// itself may not read.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <span>

namespace ringjax {

// An address in a process, and the random number that the process has stored there. The
// kernel may reuse a process id. A reader that finds the number at the address has
// verified that the process id still belongs to the process that published the proof.
struct Proof {
  uint64_t at, number;
};

// Returns the proof of this process. Where Yama lets only ancestors read a process
// (`ptrace_scope` 1), the call also permits the parent process and all descendants of
// the parent, among them the other ranks, to read this process. If the parent is
// process 1, the call permits nothing, and under Yama the rings carry all messages.
Proof OwnProof();

class ProcessMemory {
 public:
  // `pid` is the process id in the PID namespace of this process. If `pid` is 0, the
  // process is unknown and its memory cannot be read.
  ProcessMemory(pid_t pid, const Proof& proof) : pid_(pid), proof_(proof) {}

  // Returns whether the memory can be read and belongs to the process of the proof.
  bool CanRead() const { return Read({}, {}) == 0; }

  // Reads like process_vm_readv. Returns the number of bytes read, which may be fewer
  // than requested; -1 if nothing can be read, the proof is of another process, or a
  // list has more than kMaxPieces pieces. One system call checks the proof and reads
  // the pieces, so the process cannot be replaced in between.
  ptrdiff_t Read(std::span<const iovec> to, std::span<const iovec> from) const;

 private:
  pid_t pid_;
  Proof proof_;
};
inline constexpr size_t kMaxPieces = 255;  // 256 with the proof; Linux's limit is 1024

}  // namespace ringjax
