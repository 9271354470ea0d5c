// How far the calls of one generation have come: what a rank reports about it when it
// has ended, so that all ranks decide alike what was finished (succession.h).
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>

namespace ringjax {

struct Standing {
  uint64_t returned = 0;   // calls that have returned: complete on all ranks
  uint64_t done = 0;       // calls whose results are complete on this rank
  bool repeatable = true;  // the call under way, if any, still has its inputs
};

class Progress {
 public:
  // Marks that a call may change what is reported. `Begin` comes before the last look
  // at whether the generation was aborted, `Settled` after the abort, all in one order:
  // either the call sees the abort or the report waits for the call.
  void Begin() { active_.store(true, std::memory_order_seq_cst); }
  // `aborted` is asked after the mark is gone: before, an abort in between would leave
  // `Settled` waiting for nobody.
  template <typename Aborted>
  void End(Aborted&& aborted) {
    active_.store(false, std::memory_order_seq_cst);
    if (!aborted()) return;
    std::lock_guard lock(mutex_);
    stopped_.notify_all();
  }

  // By the thread of a call. Numbers are those of the communicator, which may have
  // served others before it was installed.
  void Begun(uint64_t sequence) { begun_.store(sequence, std::memory_order_relaxed); }
  void Done(uint64_t sequence) { done_.store(sequence, std::memory_order_relaxed); }
  void Returned(uint64_t sequence) {
    returned_.store(sequence, std::memory_order_relaxed);
    repeatable_.store(true, std::memory_order_relaxed);
  }
  void set_repeatable(bool whether) {
    repeatable_.store(whether, std::memory_order_relaxed);
  }

  // After the abort: true once no call is active.
  bool Settled(double seconds) {
    std::unique_lock lock(mutex_);
    return stopped_.wait_for(lock, std::chrono::duration<double>(seconds), [this] {
      return !active_.load(std::memory_order_seq_cst);
    });
  }
  // From now on calls count from 1.
  void Installed() { before_.store(begun_.load()); }
  uint64_t begun() const { return Since(begun_); }
  Standing Read() const {
    return {Since(returned_), Since(done_),
            repeatable_.load(std::memory_order_relaxed)};
  }

 private:
  uint64_t Since(const std::atomic<uint64_t>& n) const {
    const uint64_t before = before_.load(), now = n.load(std::memory_order_relaxed);
    return now > before ? now - before : 0;
  }

  std::atomic<bool> active_{false}, repeatable_{true};
  std::atomic<uint64_t> begun_{0}, returned_{0}, done_{0}, before_{0};
  std::mutex mutex_;
  std::condition_variable stopped_;
};

}  // namespace ringjax
