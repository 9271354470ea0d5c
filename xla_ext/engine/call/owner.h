// Owner: a member of an object that records which process created the object.
//
// A forked child has a copy of the object, but not the threads of the object. The copy
// must therefore neither end nor join these threads, and is left behind as it is.
#pragma once

#include <pthread.h>

#include <atomic>

namespace ringjax {

class Owner {
 public:
  bool IsHere() const { return forks_ == Forks(); }

 private:
  // Returns how many forks lie between this process and the ancestor that first called
  // Forks. This is cheaper than getpid, a system call that takes a twentieth of the
  // time of a short operation. Relaxed order suffices, because only a new child writes
  // the counter, while it has one thread.
  static int Forks() {
    static std::atomic<int> forks{0};
    [[maybe_unused]] static const int watched =
        pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1); });
    return forks.load(std::memory_order_relaxed);
  }

  int forks_ = Forks();
};

}  // namespace ringjax
