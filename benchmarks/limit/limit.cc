// What an allreduce between processes of one machine costs at the least: a loop over
// shared memory that moves as few bytes as private buffers allow, and plain streams
// over loopback TCP. A yardstick and no library: no NaN in bfloat16, no error but a
// rank that does not come. Built and called by limit.py.
//
// Up to kAtOnce bytes, every rank writes all it has to its slot, and adds up all slots:
// one barrier. Longer messages pass through in tiles. Rank r is to add up the r-th part
// of a tile, so that a rank writes only the other parts to its slot, adds its own from
// where it lies, and fetches the other sums: (P-1)/P of the message in, as much out.
// Two sets of slots take turns, and one barrier separates [copy k in, add k-1, copy k-2
// out].

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include "limit_tcp.h"

namespace {

constexpr int kMaxRanks = 8;
constexpr size_t kLine = 64;
constexpr size_t kAtOnce = 16 << 10;
constexpr size_t kMaxTile = 2 << 20;
// Slots must not start at the same place of a cache.
constexpr size_t kStride = kMaxTile + 4096 + 4 * kLine;
constexpr int kPatience = 60;  // seconds

struct alignas(kLine) Flag {
  std::atomic<uint64_t> value;
};

struct Control {  // zero at first, as the kernel gives it
  std::array<Flag, kMaxRanks> arrived;
  std::atomic<int> port;
};

void Pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// -- adding
// ----------------------------------------------------------------------------

float Wide(float x) { return x; }
float Wide(uint16_t x) { return std::bit_cast<float>(uint32_t{x} << 16); }

void Narrow(float x, float* out) { *out = x; }
void Narrow(float x, uint16_t* out) {  // to the nearest, ties to even
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  *out = static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

using Sources = std::array<const char*, kMaxRanks>;
using Adder = void (*)(const Sources&, char*, char*, size_t, float);

// Both results are the same; they may be the same memory, and that of a source.
template <typename T, size_t... kRank>
void Add(const Sources& sources, char* first, char* second, size_t bytes, float scale) {
  const T* in[] = {reinterpret_cast<const T*>(sources[kRank])...};
  T* a = reinterpret_cast<T*>(first);
  T* b = reinterpret_cast<T*>(second);
  const size_t count = bytes / sizeof(T);
#pragma GCC ivdep
  for (size_t i = 0; i < count; ++i) {
    T sum;
    Narrow(scale * (... + Wide(in[kRank][i])), &sum);
    a[i] = sum;
    b[i] = sum;
  }
}

template <typename T, size_t... kRank>
constexpr Adder AdderOf(std::index_sequence<kRank...>) {
  return Add<T, kRank...>;
}

template <typename T, size_t... kRanks>
constexpr std::array<Adder, kMaxRanks> Adders(std::index_sequence<kRanks...>) {
  return {AdderOf<T>(std::make_index_sequence<kRanks + 1>())...};
}

constexpr auto kRankCounts = std::make_index_sequence<kMaxRanks>();
constexpr auto kAddFloat = Adders<float>(kRankCounts);
constexpr auto kAddBfloat16 = Adders<uint16_t>(kRankCounts);

// memcpy may be a string instruction, which is the best there is within a core's caches
// and several times slower on lines of a distant core.
enum Copying { kMemcpy, kStreamed, kVector };

void CopyVector(char* to, const char* from, size_t bytes) {
  size_t i = 0;
#ifdef __AVX__
  for (; i + 128 <= bytes; i += 128) {
    const auto* in = reinterpret_cast<const __m256i*>(from + i);
    auto* out = reinterpret_cast<__m256i*>(to + i);
    const __m256i a = _mm256_loadu_si256(in), b = _mm256_loadu_si256(in + 1);
    const __m256i c = _mm256_loadu_si256(in + 2), d = _mm256_loadu_si256(in + 3);
    _mm256_storeu_si256(out, a);
    _mm256_storeu_si256(out + 1, b);
    _mm256_storeu_si256(out + 2, c);
    _mm256_storeu_si256(out + 3, d);
  }
#endif
  std::memcpy(to + i, from + i, bytes - i);
}

// A copy that does not read what it overwrites, and leaves the caches alone.
void CopyPast(char* to, const char* from, size_t bytes) {
#ifdef __AVX__
  size_t head = -reinterpret_cast<uintptr_t>(to) % 32;
  head = std::min(head, bytes);
  std::memcpy(to, from, head);
  size_t i = head;
  for (; i + 32 <= bytes; i += 32) {
    const auto* line = reinterpret_cast<const __m256i*>(from + i);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i), _mm256_loadu_si256(line));
  }
  std::memcpy(to + i, from + i, bytes - i);
  _mm_sfence();
#else
  std::memcpy(to, from, bytes);
#endif
}

}  // namespace

// -- what limit.py passes
// ---------------------------------------------------------------

extern "C" struct LimitJob {
  char* const* inputs;
  char* const* outputs;  // the inputs themselves: in place
  const size_t* ends;    // in bytes, of all tensors one behind the other
  size_t tensors;        // one at least
  size_t tile;
  float scale;
  int bfloat16;
  int copying;  // see Copying
};

namespace {

// -- one rank
// ---------------------------------------------------------------------------

class Rank {
 public:
  Rank(int rank, int size, int spins) : rank_(rank), size_(size), spins_(spins) {}

  ~Rank() {
    if (base_ != nullptr) munmap(base_, Bytes());
  }

  bool Join(const char* name) {
    const int file = shm_open(name, O_CREAT | O_RDWR, 0600);
    if (file < 0) return false;
    void* base = MAP_FAILED;
    if (ftruncate(file, Bytes()) == 0) {
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
    const bool all = Barrier();
    if (rank_ == 0) shm_unlink(name);  // everybody has it open
    if (!all || size_ == 1 || rank_ > 1) return all;
    return streams_.Connect(rank_, control_->port.load());
  }

  bool Allreduce(const LimitJob& job) {
    const Adder add = (job.bfloat16 ? kAddBfloat16 : kAddFloat)[size_ - 1];
    const size_t total = job.ends[job.tensors - 1];
    return total <= kAtOnce ? AtOnce(job, add, total) : Tiled(job, add, total);
  }

  bool Transfer(size_t bytes, int streams) {
    return rank_ > 1 || streams_.Transfer(rank_, bytes, streams);
  }

 private:
  size_t Bytes() const { return 2 * (size_ + 1) * kStride + 4096; }

  char* Slot(size_t tile, int rank) const {  // rank == size_: the sums
    return base_ + 4096 + (tile % 2 * (size_ + 1) + rank) * kStride;
  }

  bool Barrier() {
    ++epoch_;
    control_->arrived[rank_].value.store(epoch_, std::memory_order_release);
    for (int rank = 0; rank < size_; ++rank) {
      if (!WaitFor(control_->arrived[rank].value)) return false;
    }
    return true;
  }

  bool WaitFor(const std::atomic<uint64_t>& flag) const {
    using Clock = std::chrono::steady_clock;
    Clock::time_point deadline;
    for (int64_t yields = -1; flag.load(std::memory_order_acquire) < epoch_;) {
      for (int i = 0; i < spins_; ++i) {
        if (flag.load(std::memory_order_acquire) >= epoch_) return true;
        Pause();
      }
      if (++yields == 0) deadline = Clock::now() + std::chrono::seconds(kPatience);
      if (yields % 1024 == 1023 && Clock::now() > deadline) return false;
      sched_yield();
    }
    return true;
  }

  // Calls visit(tensor, place in it, place in the range, bytes) for [begin, end) of all
  // tensors one behind the other.
  template <typename Visit>
  static void ForEach(const LimitJob& job, size_t begin, size_t end, Visit visit) {
    const size_t* ends = job.ends;
    size_t i = std::upper_bound(ends, ends + job.tensors, begin) - ends;
    for (size_t at = begin; at < end; ++i) {
      const size_t start = i == 0 ? 0 : ends[i - 1];
      const size_t stop = std::min(ends[i], end);
      if (stop > at) visit(i, at - start, at - begin, stop - at);
      at = std::max(at, stop);
    }
  }

  bool AtOnce(const LimitJob& job, Adder add, size_t total) {
    char* slot = Slot(tiles_, rank_);
    ForEach(job, 0, total, [&](size_t i, size_t place, size_t at, size_t bytes) {
      std::memcpy(slot + at, job.inputs[i] + place, bytes);
    });
    if (!Barrier()) return false;
    ForEach(job, 0, total, [&](size_t i, size_t place, size_t at, size_t bytes) {
      Sources sources{};
      for (int rank = 0; rank < size_; ++rank) {
        sources[rank] = Slot(tiles_, rank) + at;
      }
      char* out = job.outputs[i] + place;
      add(sources, out, out, bytes, job.scale);
    });
    ++tiles_;
    return true;
  }

  bool Tiled(const LimitJob& job, Adder add, size_t total) {
    const size_t tile = std::min({job.tile, kMaxTile, total});
    const size_t count = (total + tile - 1) / tile;
    for (size_t k = 0; k < count + 2; ++k) {
      if (k >= 2) CopyOut(job, (k - 2) * tile, std::min(total, (k - 1) * tile), k - 2);
      if (k >= 1 && k <= count) {
        AddUp(job, add, (k - 1) * tile, std::min(total, k * tile), k - 1);
      }
      if (k < count) CopyIn(job, k * tile, std::min(total, (k + 1) * tile), k);
      if (k <= count && !Barrier()) return false;
    }
    tiles_ += count;
    return true;
  }

  // The part of [begin, end) that `rank` adds up.
  std::pair<size_t, size_t> Part(size_t begin, size_t end, int rank) const {
    const size_t step = kLine * size_;
    const size_t each = (end - begin + step - 1) / step * kLine;
    return {std::min(end, begin + rank * each),
            std::min(end, begin + (rank + 1) * each)};
  }

  // Calls visit(begin, end) for what the other ranks add up: before and behind our
  // part.
  template <typename Visit>
  void ForOthers(size_t begin, size_t end, Visit visit) const {
    const auto [low, high] = Part(begin, end, rank_);
    if (begin < low) visit(begin, low);
    if (high < end) visit(high, end);
  }

  static void Copy(const LimitJob& job, char* to, const char* from, size_t bytes) {
    job.copying == kVector ? CopyVector(to, from, bytes)
                           : static_cast<void>(std::memcpy(to, from, bytes));
  }

  void CopyIn(const LimitJob& job, size_t begin, size_t end, size_t k) {
    char* slot = Slot(tiles_ + k, rank_);
    ForOthers(begin, end, [&](size_t low, size_t high) {
      ForEach(job, low, high, [&](size_t i, size_t place, size_t at, size_t bytes) {
        Copy(job, slot + low - begin + at, job.inputs[i] + place, bytes);
      });
    });
  }

  void AddUp(const LimitJob& job, Adder add, size_t begin, size_t end, size_t k) {
    const auto [low, high] = Part(begin, end, rank_);
    const size_t start = low - begin;
    char* sums = Slot(tiles_ + k, size_);
    ForEach(job, low, high, [&](size_t i, size_t place, size_t at, size_t bytes) {
      Sources sources{};
      for (int rank = 0; rank < size_; ++rank) {
        sources[rank] = Slot(tiles_ + k, rank) + start + at;
      }
      sources[rank_] = job.inputs[i] + place;
      char* sum = sums + start + at;
      add(sources, job.copying == kStreamed ? sum : job.outputs[i] + place, sum, bytes, job.scale);
    });
  }

  void CopyOut(const LimitJob& job, size_t begin, size_t end, size_t k) {
    const char* sums = Slot(tiles_ + k, size_);
    const auto copy = [&](size_t low, size_t high) {
      ForEach(job, low, high, [&](size_t i, size_t place, size_t at, size_t bytes) {
        const char* from = sums + low - begin + at;
        char* to = job.outputs[i] + place;
        job.copying == kStreamed ? CopyPast(to, from, bytes)
                                 : Copy(job, to, from, bytes);
      });
    };
    job.copying == kStreamed ? copy(begin, end) : ForOthers(begin, end, copy);
  }

  const int rank_, size_, spins_;
  char* base_ = nullptr;
  Control* control_ = nullptr;
  uint64_t epoch_ = 0;
  size_t tiles_ = 0;  // so far: which set of slots is next
  Streams streams_;
};

}  // namespace

extern "C" {

// Returns null if not all ranks come, or there are too many. A rank that waits looks
// `spins` times before it lets others run.
void* limit_join(const char* name, int rank, int size, int spins) {
  if (size < 1 || size > kMaxRanks || rank < 0 || rank >= size) return nullptr;
  auto self = std::make_unique<Rank>(rank, size, spins);
  return self->Join(name) ? self.release() : nullptr;
}

void limit_leave(void* rank) { delete static_cast<Rank*>(rank); }

// Both: `calls` times; 0, or -1 if another rank is missing.
int limit_allreduce(void* rank, const LimitJob* job, int calls) {
  for (int i = 0; i < calls; ++i) {
    if (!static_cast<Rank*>(rank)->Allreduce(*job)) return -1;
  }
  return 0;
}

int limit_transfer(void* rank, size_t bytes, int streams, int calls) {
  for (int i = 0; i < calls; ++i) {
    if (!static_cast<Rank*>(rank)->Transfer(bytes, streams)) return -1;
  }
  return 0;
}

}  // extern "C"
