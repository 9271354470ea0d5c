// See process_memory.h.
#include "transport/process_memory.h"

#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <random>

namespace ringjax {
namespace {

// The random number of the proof, and the process that drew the number. A forked child
// has the number at the same address, but is another process and must draw its own.
struct ProofNumber {
  std::mutex mutex;
  pid_t pid = 0;
  uint64_t number = 0;
} drawn;

}  // namespace

Proof OwnProof() {
  const std::lock_guard lock(drawn.mutex);
  if (drawn.pid != getpid()) {
    // Process 1 must not get the permission to read this process: all processes descend
    // from process 1, even those of other jobs. getppid returns 0 if the parent is in
    // another PID namespace; PR_SET_PTRACER with 0 would take back a permission set by
    // a crash handler.
    if (const pid_t parent = getppid(); parent > 1)
      prctl(PR_SET_PTRACER, static_cast<unsigned long>(parent), 0, 0, 0);
    std::random_device random;
    drawn.number = (uint64_t{random()} << 32) | random();
    drawn.pid = getpid();
  }
  return {reinterpret_cast<uintptr_t>(&drawn.number), drawn.number};
}

ptrdiff_t ProcessMemory::Read(std::span<const iovec> to,
                              std::span<const iovec> from) const {
  if (pid_ <= 0 || to.size() > kMaxPieces || from.size() > kMaxPieces) return -1;
  std::array<iovec, 1 + kMaxPieces> here, there;
  uint64_t number = 0;
  here[0] = {&number, sizeof number};
  there[0] = {reinterpret_cast<void*>(proof_.at), sizeof number};
  std::copy(to.begin(), to.end(), here.begin() + 1);
  std::copy(from.begin(), from.end(), there.begin() + 1);
  const ptrdiff_t got = process_vm_readv(pid_, here.data(), to.size() + 1, there.data(),
                                         from.size() + 1, 0);
  constexpr ptrdiff_t kProof = sizeof number;
  return got < kProof || number != proof_.number ? -1 : got - kProof;
}

}  // namespace ringjax
