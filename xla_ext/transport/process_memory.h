// Memory of another process of this host, read where it lies: process_vm_readv(2).
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <span>

namespace ringjax {

// Whose memory it is: a process, and where in it which number lies. Process numbers
// alone do not tell: in another container the same one may be another process.
struct ProcessMemory {
  uint64_t pid, proof_at, proof;
};

// Of this process. Where Yama lets only ancestors read (`ptrace_scope` 1), asking for
// it lets the process that started this one, and what descends from it, read, too: the
// other ranks.
ProcessMemory OwnMemory();

// Whether that memory is here to be read, and is that process's.
bool CanRead(const ProcessMemory& memory);

// As process_vm_readv: bytes that were read, which may be fewer than wanted; -1 if none
// can be.
ptrdiff_t ReadMemory(const ProcessMemory& memory, std::span<const iovec> to,
                     std::span<const iovec> from);

}  // namespace ringjax
