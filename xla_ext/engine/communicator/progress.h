// Progress: how far the calls of one epoch got on this rank. After the epoch has ended,
// every rank reports its progress to the coordinator, which makes the commit decision
// from all reports (resilient_comm.h).
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>

namespace ringjax {

struct ProgressReport {
  uint64_t returned = 0;   // calls that have returned: all ranks have their results
  uint64_t done = 0;       // calls whose results are complete on this rank
  bool repeatable = true;  // the call that was running, if any, still has its inputs
};

// Thread-safe. The thread that runs a call writes the progress. After an abort, the
// reporting thread waits with AwaitInactive and then calls Read. The counters may be
// relaxed, because they are stored before End, and AwaitInactive returns true only
// after End.
class Progress {
 public:
  // Marks that a call may change the progress report. The call stores this mark and
  // then loads the abort flag (CallRunner::Guarded). The reporting thread loads the
  // mark (AwaitInactive) after the abort has stored the flag. All four accesses are
  // seq_cst, so either the call sees the abort, or AwaitInactive sees the mark and
  // waits for the call.
  void Begin() { active_.store(true, std::memory_order_seq_cst); }
  // Clears the mark of Begin, and then calls `aborted`. In the opposite order, an abort
  // between the two would leave AwaitInactive waiting without a notification.
  template <typename Aborted>
  void End(Aborted&& aborted) {
    active_.store(false, std::memory_order_seq_cst);
    if (!aborted()) return;
    std::lock_guard lock(mutex_);
    stopped_.notify_all();
  }

  // Called by the thread that runs a call. BeginNext gives the call its sequence
  // number.
  void BeginNext() { begun_.store(sequence() + 1, std::memory_order_relaxed); }
  uint64_t sequence() const { return begun_.load(std::memory_order_relaxed); }
  void Done(uint64_t sequence) { done_.store(sequence, std::memory_order_relaxed); }
  void Returned(uint64_t sequence) {
    returned_.store(sequence, std::memory_order_relaxed);
    repeatable_.store(true, std::memory_order_relaxed);
  }
  void set_repeatable(bool whether) {
    repeatable_.store(whether, std::memory_order_relaxed);
  }

  // Waits, after the abort, until no call is active. Returns false after `seconds`.
  bool AwaitInactive(double seconds) {
    std::unique_lock lock(mutex_);
    return stopped_.wait_for(lock, std::chrono::duration<double>(seconds), [this] {
      return !active_.load(std::memory_order_seq_cst);
    });
  }
  // Makes reports count the following calls from 1, because a communicator may serve
  // calls before it is installed as an epoch, and reports omit those calls.
  void Installed() { before_.store(begun_.load()); }
  uint64_t begun() const { return Since(begun_); }
  ProgressReport Read() const {
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
