// One rank of the limit: the memory that all ranks share, and waits for other ranks.

#ifndef RINGJAX_BENCHMARKS_LIMIT_RANK_H_
#define RINGJAX_BENCHMARKS_LIMIT_RANK_H_

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "limit_copy.h"
#include "limit_tcp.h"

constexpr size_t kLine = 64;
constexpr size_t kMaxTile = 2 << 20;
// With this stride, slots do not start at the same set of a cache.
constexpr size_t kStride = kMaxTile + 4096 + 4 * kLine;
constexpr int kWaitLimit = 60;  // seconds until a wait fails

struct alignas(kLine) Flag {
  std::atomic<uint64_t> value;
};

// The addresses of a rank's private memory, which other ranks read and write.
struct alignas(kLine) Place {
  int64_t process;
  uint64_t given, out;
};

// The kernel returns new shared memory filled with zeros.
struct Control {
  std::array<Flag, kMaxRanks> arrived;
  Flag sent;                          // number of broadcast tiles that were written
  std::array<Flag, kMaxRanks> taken;  // number of tiles that each rank has read
  std::array<Place, kMaxRanks> places;
  std::atomic<int> port;
  std::atomic<int> unreadable;  // number of ranks that may not read other ranks
};

class Rank {
 public:
  Rank(int rank, int size, int spins) : rank_(rank), size_(size), spins_(spins) {}
  Rank(const Rank&) = delete;
  Rank& operator=(const Rank&) = delete;
  ~Rank() {
    if (base_ != nullptr) munmap(base_, Bytes());
  }

  bool Join(const char* name) {
    const int file = shm_open(name, O_CREAT | O_RDWR, 0600);
    if (file < 0) return false;
    void* base = MAP_FAILED;
    if (ftruncate(file, static_cast<off_t>(Bytes())) == 0) {
      base = mmap(nullptr, Bytes(), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    }
    close(file);
    if (base == MAP_FAILED) return false;
    base_ = static_cast<char*>(base);
    madvise(base_, Bytes(), MADV_HUGEPAGE);
#ifdef MADV_POPULATE_WRITE
    madvise(base_, Bytes(), MADV_POPULATE_WRITE);
#endif
    control_ = reinterpret_cast<Control*>(base_);
    if (rank_ == 0) streams_.Listen(&control_->port);
    const bool all = Barrier() && TryReading();
    if (rank_ == 0) shm_unlink(name);  // all ranks have opened the file
    if (!all || size_ == 1 || rank_ > 1) return all;
    return streams_.Connect(rank_, control_->port.load());
  }

  int rank() const { return rank_; }
  int size() const { return size_; }
  Control* control() const { return control_; }
  Streams* streams() { return &streams_; }
  bool can_read() const { return control_->unreadable.load() == 0; }

  // Returns a slot. Two sets of slots alternate from tile to tile. Each set has a slot
  // for each rank, and one more, which belongs to no rank.
  char* Slot(size_t tile, int rank) const {
    return base_ + kControl +
           (tile % 2 * (Size() + 1) + static_cast<size_t>(rank)) * kStride;
  }

  // Returns private memory of this object.
  char* Scratch(size_t bytes) {
    if (scratch_.size() < bytes) scratch_.resize(bytes);
    return scratch_.data();
  }

  // The two halves of a barrier, and the whole barrier.
  void Arrive() {
    control_->arrived[static_cast<size_t>(rank_)].value.store(
        ++epoch_, std::memory_order_release);
  }
  bool Await() const {
    for (size_t rank = 0; rank < Size(); ++rank) {
      if (!WaitFor(control_->arrived[rank], epoch_)) return false;
    }
    return true;
  }
  bool Barrier() {
    Arrive();
    return Await();
  }

  bool WaitFor(const Flag& flag, uint64_t value) const {
    using Clock = std::chrono::steady_clock;
    Clock::time_point deadline;
    for (int64_t yields = -1; flag.value.load(std::memory_order_acquire) < value;) {
      for (int i = 0; i < spins_; ++i) {
        if (flag.value.load(std::memory_order_acquire) >= value) return true;
        Pause();
      }
      if (++yields == 0) deadline = Clock::now() + std::chrono::seconds(kWaitLimit);
      if (yields % 1024 == 1023 && Clock::now() > deadline) return false;
      sched_yield();
    }
    return true;
  }

  // Publishes the memory that other ranks may access until the next barrier is over.
  void Post(const void* given, void* out) {
    control_->places[static_cast<size_t>(rank_)] = {
        getpid(), reinterpret_cast<uint64_t>(given), reinterpret_cast<uint64_t>(out)};
  }
  const Place& PlaceOf(int rank) const {
    return control_->places[static_cast<size_t>(rank)];
  }

  // Ranks use the slots for a broadcast, or in turns. In a broadcast, ranks are ahead
  // of each other by more than a barrier allows, so a change of the use needs a
  // barrier.
  bool Flow() { return Use(true); }
  bool TakeTurns() { return Use(false); }

  size_t tiles = 0;   // number of tiles in turns so far, which selects the set of slots
  size_t flowed = 0;  // number of tiles of broadcasts so far

 private:
  static constexpr size_t kControl = 8192;
  static_assert(sizeof(Control) <= kControl);

  static void Pause() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

  bool Use(bool flows) {
    if (flows_ == flows) return true;
    flows_ = flows;
    return Barrier();
  }

  size_t Size() const { return static_cast<size_t>(size_); }
  size_t Bytes() const { return kControl + 2 * (Size() + 1) * kStride; }

  bool TryReading() {
    // Yama by default lets only ancestors read the memory of a process.
    prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY);
    uint64_t word = 0;
    Post(&epoch_, nullptr);
    if (!Barrier()) return false;
    const Place& next = PlaceOf((rank_ + 1) % size_);
    const iovec here{&word, sizeof word};
    const iovec there{reinterpret_cast<void*>(next.given), sizeof word};
    if (process_vm_readv(static_cast<pid_t>(next.process), &here, 1, &there, 1, 0) !=
        sizeof word) {
      control_->unreadable.fetch_add(1);
    }
    return Barrier();
  }

  const int rank_, size_, spins_;
  char* base_ = nullptr;
  Control* control_ = nullptr;
  uint64_t epoch_ = 0;
  bool flows_ = false;
  std::vector<char> scratch_;
  Streams streams_;
};

#endif  // RINGJAX_BENCHMARKS_LIMIT_RANK_H_
