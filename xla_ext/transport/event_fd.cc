// See event_fd.h.
#include "transport/event_fd.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>

namespace ringjax {

EventFd::EventFd(int fd) : fd_(fd) {
  // The creator may have made a blocking eventfd, but neither Ring nor Drain may block.
  if (const int flags = fcntl(fd, F_GETFL); flags >= 0)
    fcntl(fd, F_SETFL, flags | O_NONBLOCK);
  fcntl(fd, F_SETFD, FD_CLOEXEC);
}

void EventFd::Ring() {
  const uint64_t one = 1;
  // Other errors are ignored: with a full counter (EAGAIN) the thread wakes up anyway.
  while (write(fd(), &one, sizeof(one)) < 0 && errno == EINTR) {
  }
}

void EventFd::Drain() {
  uint64_t rings;
  while (read(fd(), &rings, sizeof(rings)) < 0 && errno == EINTR) {
  }
}

}  // namespace ringjax
