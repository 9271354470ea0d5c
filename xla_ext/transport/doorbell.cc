// Implements the eventfd that wakes a sleeping rank. Links and shared segments decide
// when to ring it.
#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>

#include "transport/link.h"

namespace ringjax {

Doorbell::Doorbell(int fd) : fd_(fd) {
  // The creator may have made a blocking eventfd, but neither Ring nor Drain may block.
  if (const int flags = fcntl(fd, F_GETFL); flags >= 0)
    fcntl(fd, F_SETFL, flags | O_NONBLOCK);
  fcntl(fd, F_SETFD, FD_CLOEXEC);
}

void Doorbell::Ring() {
  const uint64_t one = 1;
  // Other errors are ignored: with a full counter (EAGAIN) the owner wakes up anyway,
  // and the link detects a peer that is gone.
  while (write(fd(), &one, sizeof(one)) < 0 && errno == EINTR) {
  }
}

void Doorbell::Drain() {
  uint64_t rings;
  while (read(fd(), &rings, sizeof(rings)) < 0 && errno == EINTR) {
  }
}

}  // namespace ringjax
