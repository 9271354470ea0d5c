// Which process made an object. A forked child has a copy of it but not its threads, so
// there it must neither be ended nor waited for; it is left behind as it is.
#pragma once

#include <unistd.h>

namespace ringjax {

class Owner {
 public:
  bool IsHere() const { return pid_ == getpid(); }

 private:
  pid_t pid_ = getpid();
};

}  // namespace ringjax
