// The allreduce of limit.cc.
//
// Up to kAtOnce bytes, every rank writes its message to its slot and, after one
// barrier, adds all slots. Longer messages are cut into tiles. Rank r adds the r-th
// part of a tile. So a rank writes only the other parts to its slot, adds its own part
// from its input, and reads the other ranks' sums: it writes (P-1)/P of the message to
// shared memory, and reads as many bytes. Two sets of slots alternate. One barrier ends
// each round: copy tile k in, add tile k-1, copy tile k-2 out.

#ifndef RINGJAX_BENCHMARKS_LIMIT_ALLREDUCE_H_
#define RINGJAX_BENCHMARKS_LIMIT_ALLREDUCE_H_

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <utility>

#include "limit_copy.h"
#include "limit_rank.h"

// The arguments of an allreduce, from limit.py.
struct LimitJob {
  char* const* inputs;
  char* const* outputs;  // equal to the inputs for a call in place
  const size_t* ends;    // ends of the tensors in bytes, as if they were concatenated
  size_t tensors;        // one or more
  size_t tile;
  float scale;
  int bfloat16;
  int copying;  // see Copying
};

class Allreduce {
 public:
  Allreduce(Rank* self, const LimitJob& job)
      : self_(*self),
        job_(job),
        copying_(static_cast<Copying>(job.copying)),
        rank_(static_cast<size_t>(self->rank())),
        size_(static_cast<size_t>(self->size())),
        add_((job.bfloat16 != 0 ? kAddBfloat16 : kAddFloat)[size_ - 1]),
        total_(job.ends[job.tensors - 1]) {}

  bool Run() {
    if (!self_.TakeTurns()) return false;
    return total_ <= kAtOnce ? AtOnce() : Tiled();
  }

 private:
  static constexpr size_t kAtOnce = 16 << 10;

  // Calls visit(tensor, offset in the tensor, offset in the range, bytes) for each
  // piece of a tensor in [begin, end) of the concatenated tensors.
  template <typename Visit>
  void ForEach(size_t begin, size_t end, Visit visit) const {
    const size_t* ends = job_.ends;
    auto i =
        static_cast<size_t>(std::upper_bound(ends, ends + job_.tensors, begin) - ends);
    for (size_t at = begin; at < end; ++i) {
      const size_t start = i == 0 ? 0 : ends[i - 1];
      const size_t stop = std::min(ends[i], end);
      if (stop > at) visit(i, at - start, at - begin, stop - at);
      at = std::max(at, stop);
    }
  }

  bool AtOnce() {
    char* slot = Slot(0, rank_);
    ForEach(0, total_, [&](size_t i, size_t place, size_t at, size_t bytes) {
      std::memcpy(slot + at, job_.inputs[i] + place, bytes);
    });
    if (!self_.Barrier()) return false;
    ForEach(0, total_, [&](size_t i, size_t place, size_t at, size_t bytes) {
      Sources sources{};
      for (size_t rank = 0; rank < size_; ++rank) sources[rank] = Slot(0, rank) + at;
      char* out = job_.outputs[i] + place;
      add_(sources, out, out, bytes, job_.scale);
    });
    ++self_.tiles;
    return true;
  }

  bool Tiled() {
    const size_t tile = std::min({job_.tile, kMaxTile, total_});
    const size_t count = (total_ + tile - 1) / tile;
    for (size_t k = 0; k < count + 2; ++k) {
      if (k >= 2) CopyOut((k - 2) * tile, std::min(total_, (k - 1) * tile), k - 2);
      if (k >= 1 && k <= count) {
        AddUp((k - 1) * tile, std::min(total_, k * tile), k - 1);
      }
      if (k < count) CopyIn(k * tile, std::min(total_, (k + 1) * tile), k);
      if (k <= count && !self_.Barrier()) return false;
    }
    self_.tiles += count;
    return true;
  }

  // Returns the slot of a rank, or the slot for the sums if `rank` is `size_`.
  char* Slot(size_t k, size_t rank) const {
    return self_.Slot(self_.tiles + k, static_cast<int>(rank));
  }

  // Returns the part of [begin, end) that `rank` adds.
  std::pair<size_t, size_t> Part(size_t begin, size_t end, size_t rank) const {
    const size_t step = kLine * size_;
    const size_t each = (end - begin + step - 1) / step * kLine;
    return {std::min(end, begin + rank * each),
            std::min(end, begin + (rank + 1) * each)};
  }

  // Calls visit(begin, end) for the parts that other ranks add, before and behind the
  // part of this rank.
  template <typename Visit>
  void ForOthers(size_t begin, size_t end, Visit visit) const {
    const auto [low, high] = Part(begin, end, rank_);
    if (begin < low) visit(begin, low);
    if (high < end) visit(high, end);
  }

  void CopyIn(size_t begin, size_t end, size_t k) {
    char* slot = Slot(k, rank_);
    const Copying how = copying_ == kStreamed ? kMemcpy : copying_;
    ForOthers(begin, end, [&](size_t low, size_t high) {
      ForEach(low, high, [&](size_t i, size_t place, size_t at, size_t bytes) {
        Copy(how, slot + low - begin + at, job_.inputs[i] + place, bytes);
      });
    });
  }

  void AddUp(size_t begin, size_t end, size_t k) {
    const auto [low, high] = Part(begin, end, rank_);
    const size_t start = low - begin;
    char* sums = Slot(k, size_);
    ForEach(low, high, [&](size_t i, size_t place, size_t at, size_t bytes) {
      Sources sources{};
      for (size_t rank = 0; rank < size_; ++rank) {
        sources[rank] = Slot(k, rank) + start + at;
      }
      sources[rank_] = job_.inputs[i] + place;
      char* sum = sums + start + at;
      char* out = copying_ == kStreamed ? sum : job_.outputs[i] + place;
      add_(sources, out, sum, bytes, job_.scale);
    });
  }

  void CopyOut(size_t begin, size_t end, size_t k) {
    const char* sums = Slot(k, size_);
    const auto copy = [&](size_t low, size_t high) {
      ForEach(low, high, [&](size_t i, size_t place, size_t at, size_t bytes) {
        Copy(copying_, job_.outputs[i] + place, sums + low - begin + at, bytes);
      });
    };
    copying_ == kStreamed ? copy(begin, end) : ForOthers(begin, end, copy);
  }

  Rank& self_;
  const LimitJob& job_;
  const Copying copying_;
  const size_t rank_, size_;
  const Adder add_;
  const size_t total_;
};

#endif  // RINGJAX_BENCHMARKS_LIMIT_ALLREDUCE_H_
