// A communicator of the NCCL stub: the state that ncclCommGetAsyncError returns, and
// the only way in which it waits for other ranks. nccl_exchange.cc has the work on the
// stream, libnccl_stub.cc the exported functions.
#pragma once

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "nccl_segment.h"
#include "stub_knobs.h"

namespace ringjax::nccl {

using Clock = std::chrono::steady_clock;

struct Knobs {
  int version = static_cast<int>(stub::KnobNumber("NCCL_STUB_VERSION", 22809));
  int in_progress = static_cast<int>(stub::KnobNumber("NCCL_STUB_IN_PROGRESS", 1));
  // The delay of the launch of a group that returns ncclInProgress.
  std::chrono::milliseconds latency{
      static_cast<long>(stub::KnobNumber("NCCL_STUB_LATENCY_MS", 5))};
  bool mismatch_is_error = stub::Knob("NCCL_STUB_MISMATCH", "hang") == "error";
  bool detect_death = stub::KnobNumber("NCCL_STUB_DETECT_DEATH", 0) != 0;
  int init_hang = static_cast<int>(stub::KnobNumber("NCCL_STUB_INIT_HANG", -1));
  double stall_seconds = stub::KnobNumber("NCCL_STUB_STALL_SECONDS", 0);
  stub::Failures failures{"NCCL_STUB_FAIL"};
  stub::Log log{"NCCL_STUB_LOG"};
};
inline Knobs& g_knobs = *new Knobs;  // threads of streams may outlive main()

// One call, which waits in a group and then on a stream.
struct Operation {
  Description what;
  int peer = -1;
  const std::byte* send = nullptr;
  std::byte* receive = nullptr;
};

struct CommTag {
  CommTag(int rank_, int size_, bool blocking_)
      : rank(rank_), size(size_), blocking(blocking_) {}

  const int rank, size;
  const bool blocking;
  Segment segment;

  std::mutex mutex;
  std::condition_variable changed;
  Outcome state = kInProgress;
  std::string error;
  bool aborted = false, finalized = false;
  int helpers = 0;                     // threads that work for a call that has returned
  int running = 0;                     // groups that a stream has begun
  uint64_t issued = 0, completed = 0;  // groups
  uint64_t round = 0;                  // pieces of collectives; of the running group

  Outcome State() {
    std::lock_guard lock(mutex);
    return state;
  }

  // Keeps the first error for good.
  void SetState(Outcome outcome, const std::string& why = "") {
    std::lock_guard lock(mutex);
    if (state != kSuccess && state != kInProgress) return;
    state = outcome;
    if (outcome != kSuccess && outcome != kInProgress) error = why;
    changed.notify_all();
  }

  bool Stopped() {
    std::lock_guard lock(mutex);
    return aborted || (state != kSuccess && state != kInProgress);
  }

  // Sleeps until `time` has passed or the communicator is aborted.
  void Rest(Clock::duration time) {
    std::unique_lock lock(mutex);
    changed.wait_for(lock, time, [this] { return aborted; });
  }

  RankPage& page(int r) { return segment->ranks[r]; }

  // Waits until ready() is true, or until the communicator is aborted or has failed.
  // Returns whether it was ready.
  template <typename Ready>
  bool Await(Ready&& ready) {
    while (true) {
      const uint32_t bell = segment->bell.load();
      if (ready()) return true;
      if (Stopped() || PeerDied()) return false;
      segment.Sleep(bell);
    }
  }

  // Runs `work` in a thread. Abort and destroy wait for the thread.
  template <typename Work>
  static void Help(std::shared_ptr<CommTag> comm, Work work) {
    {
      std::lock_guard lock(comm->mutex);
      comm->helpers++;
    }
    stub::StartThread([comm, work] {
      work();
      std::lock_guard lock(comm->mutex);
      comm->helpers--;
      comm->changed.notify_all();
    });
  }

 private:
  // With NCCL_STUB_DETECT_DEATH, returns whether a rank has been gone for half a
  // second. Names the first rank that has gone, because others may leave as a
  // consequence.
  bool PeerDied() {
    if (!g_knobs.detect_death) return false;
    const auto now = Clock::now();
    int first = rank;
    for (int r = 0; r < size; r++) {
      RankPage& peer = page(r);
      if (peer.attached == 0 || (peer.gone == 0 && BirthOf(peer.pid) == peer.birth))
        continue;
      if (death_seen_[r] == Clock::time_point{}) death_seen_[r] = now;
      if (first == rank || death_seen_[r] < death_seen_[first]) first = r;
    }
    if (first == rank || now - death_seen_[first] < std::chrono::milliseconds(500))
      return false;
    SetState(kRemoteError, "rank " + std::to_string(first) + " (process " +
                               std::to_string(page(first).pid) + ") is gone");
    return true;
  }

  Clock::time_point death_seen_[kMaxRanks];
};

using CommPointer = std::shared_ptr<CommTag>;

// The operations of a group on one communicator, which one host function runs.
struct Group {
  CommPointer comm;
  uint64_t number = 0;
  std::vector<Operation> operations;
};

// Runs a group and completes its number, whether or not it succeeds.
void RunGroup(Group& group);

}  // namespace ringjax::nccl
