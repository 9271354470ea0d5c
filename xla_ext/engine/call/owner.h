// Which process made an object. A forked child has a copy of it but not its threads, so
// there it must neither be ended nor waited for; it is left behind as it is.
#pragma once

#include <pthread.h>

#include <atomic>

namespace ringjax {

class Owner {
 public:
  bool IsHere() const { return generation_ == Generation(); }

 private:
  // How often this process's ancestors have forked since one of them asked first. A
  // process number would be a call of the kernel, a twentieth of a short operation.
  static int Generation() {
    static std::atomic<int> generation{0};
    [[maybe_unused]] static const int watched =
        pthread_atfork(nullptr, nullptr, [] { generation.fetch_add(1); });
    return generation.load(std::memory_order_relaxed);
  }

  int generation_ = Generation();
};

}  // namespace ringjax
