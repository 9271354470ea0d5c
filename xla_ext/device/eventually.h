// Polls for conditions of CUDA and NCCL that no function can await with a timeout.
#pragma once

#include <chrono>
#include <functional>
#include <thread>

namespace ringjax {

// Polls `done` until it returns true, for at most `seconds`. Returns whether it did.
inline bool Eventually(double seconds, const std::function<bool()>& done) {
  const auto start = std::chrono::steady_clock::now();
  while (!done()) {
    const std::chrono::duration<double> waited =
        std::chrono::steady_clock::now() - start;
    if (waited.count() > seconds) return false;
    // Poll often at first, because a commit of the training state may wait here.
    std::this_thread::sleep_for(
        std::chrono::microseconds(waited.count() < 1e-3 ? 50 : 1000));
  }
  return true;
}

}  // namespace ringjax
