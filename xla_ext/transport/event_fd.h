// An eventfd, by which threads of this process wake a thread that polls.
#pragma once

#include "transport/descriptor.h"

namespace ringjax {

class EventFd {
 public:
  explicit EventFd(int fd);  // takes ownership; makes it non-blocking
  EventFd(const EventFd&) = delete;
  int fd() const { return fd_.get(); }
  void Ring();  // callable from any thread
  void Drain();

 private:
  Descriptor fd_;
};

}  // namespace ringjax
