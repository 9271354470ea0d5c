// The eventfd that wakes a sleeping rank. Links and shared segments choose the moment.
#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>

#include "transport/link.h"

namespace ringjax {

Doorbell::Doorbell(int fd) : fd_(fd) {
  // The creator may have made a blocking eventfd, but neither Ring nor Drain may block.
  if (const int flags = fcntl(fd_, F_GETFL); flags >= 0)
    fcntl(fd_, F_SETFL, flags | O_NONBLOCK);
  fcntl(fd_, F_SETFD, FD_CLOEXEC);
}

Doorbell::~Doorbell() {
  if (fd_ >= 0) close(fd_);
}

void Doorbell::Ring() {
  const uint64_t one = 1;
  // Other errors are ignored: a full counter (EAGAIN) wakes the owner as well, and the
  // link detects a peer that is gone.
  while (write(fd_, &one, sizeof(one)) < 0 && errno == EINTR) {
  }
}

void Doorbell::Drain() {
  uint64_t rings;
  while (read(fd_, &rings, sizeof(rings)) < 0 && errno == EINTR) {
  }
}

}  // namespace ringjax
