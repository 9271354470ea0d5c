// See process_memory.h.
#include "transport/process_memory.h"

#include <sys/prctl.h>
#include <unistd.h>

#include <random>

namespace ringjax {
namespace {

struct Proof {
  Proof() { prctl(PR_SET_PTRACER, static_cast<unsigned long>(getppid()), 0, 0, 0); }
  uint64_t number = (uint64_t{std::random_device()()} << 32) | std::random_device()();
};

}  // namespace

ProcessMemory OwnMemory() {
  static const Proof proof;
  return {static_cast<uint64_t>(getpid()), reinterpret_cast<uintptr_t>(&proof.number),
          proof.number};
}

bool CanRead(const ProcessMemory& memory) {
  uint64_t number = 0;
  const iovec mine{&number, sizeof number};
  const iovec theirs{reinterpret_cast<void*>(memory.proof_at), sizeof number};
  return ReadMemory(memory, {&mine, 1}, {&theirs, 1}) == sizeof number &&
         number == memory.proof;
}

ptrdiff_t ReadMemory(const ProcessMemory& memory, std::span<const iovec> to,
                     std::span<const iovec> from) {
  return process_vm_readv(static_cast<pid_t>(memory.pid), to.data(), to.size(),
                          from.data(), from.size(), 0);
}

}  // namespace ringjax
