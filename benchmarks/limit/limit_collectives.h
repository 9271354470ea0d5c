// Broadcast, allgather, alltoall and reducescatter of limit.cc, of floats in private
// buffers, each in two ways:
//
// In tiles: every rank writes the part of the next tile that others need to its slot.
// After a barrier the others copy or add this part. A short message is one tile. A
// broadcast flows through a ring of slots: only the root writes, and it waits for the
// other ranks only if the ring is full.
//
// By reading: a rank calls process_vm_readv on the private memory of another rank. That
// is one copy, between two barriers. A reducescatter reads in pieces into a buffer that
// stays in the caches, and adds from there. The root of a broadcast may write a share
// to the others, because it would otherwise be idle.

#ifndef RINGJAX_BENCHMARKS_LIMIT_COLLECTIVES_H_
#define RINGJAX_BENCHMARKS_LIMIT_COLLECTIVES_H_

#include <sys/uio.h>

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "limit_copy.h"
#include "limit_rank.h"

enum Which { kBroadcast, kAllgather, kAlltoall, kReducescatter };
enum Way { kInTiles, kRead, kReadAndWrite };

// The arguments of a collective, from limit.py.
struct LimitMove {
  const char* given;
  char* out;
  size_t bytes;  // size of the whole vector, a multiple of the number of ranks
  size_t piece;  // bytes of the whole vector that one step moves
  int which, way;
  int copying;  // see Copying
};

class Collective {
 public:
  Collective(Rank* self, const LimitMove& move)
      : self_(*self),
        move_(move),
        which_(static_cast<Which>(move.which)),
        copying_(static_cast<Copying>(move.copying)),
        rank_(static_cast<size_t>(self->rank())),
        size_(static_cast<size_t>(self->size())),
        part_(which_ == kBroadcast ? move.bytes : move.bytes / size_) {}

  bool Run() {
    if (move_.way != kInTiles) return self_.TakeTurns() && Direct();
    if (which_ == kBroadcast) return self_.Flow() && Broadcast();
    return self_.TakeTurns() && Tiled();
  }

 private:
  static constexpr size_t kRing = 4;  // slots of a broadcast

  // In tiles.

  bool Broadcast() {
    const size_t tile = std::min(move_.piece, kMaxTile);
    for (size_t at = 0; at < part_; at += tile, ++self_.flowed) {
      const size_t bytes = std::min(tile, part_ - at);
      const size_t k = self_.flowed;
      char* slot = self_.Slot(k, static_cast<int>(k / 2 % 2));
      Control* control = self_.control();
      if (rank_ != 0) {
        if (!self_.WaitFor(control->sent, k + 1)) return false;
        Copy(copying_, move_.out + at, slot, bytes);
        control->taken[rank_].value.store(k + 1, std::memory_order_release);
        continue;
      }
      for (size_t rank = 1; k >= kRing && rank < size_; ++rank) {
        if (!self_.WaitFor(control->taken[rank], k + 1 - kRing)) return false;
      }
      Copy(In(), slot, move_.given + at, bytes);
      control->sent.value.store(k + 1, std::memory_order_release);
    }
    return true;
  }

  bool Tiled() {
    const size_t most = std::min(move_.piece, kMaxTile) / size_ / kLine * kLine;
    const size_t tile = std::min(most, (part_ + kLine - 1) / kLine * kLine);
    const size_t count = (part_ + tile - 1) / tile;
    const auto bytes = [&](size_t k) { return std::min(tile, part_ - k * tile); };
    for (size_t k = 0; k < count; ++k) {
      if (k > 0) CopyOut(k - 1, tile, bytes(k - 1));
      CopyIn(k, tile, bytes(k));
      self_.Arrive();
      if (which_ != kReducescatter) CopyOwn(k * tile, bytes(k));
      if (!self_.Await()) return false;
    }
    CopyOut(count - 1, tile, bytes(count - 1));
    self_.tiles += count;
    return true;
  }

  // Returns the part of a slot for one receiver: `tile` bytes for each rank. In an
  // allgather all ranks receive the same part.
  char* Slot(size_t k, size_t from, size_t to, size_t tile) const {
    char* slot = self_.Slot(self_.tiles + k, static_cast<int>(from));
    return slot + (which_ == kAllgather ? 0 : to * tile);
  }

  void CopyIn(size_t k, size_t tile, size_t bytes) {
    for (size_t i = 1; i < size_; ++i) {
      const size_t to = (rank_ + i) % size_;
      Copy(In(), Slot(k, rank_, to, tile), move_.given + Going(to) + k * tile, bytes);
      if (which_ == kAllgather) break;
    }
  }

  void CopyOut(size_t k, size_t tile, size_t bytes) {
    if (which_ == kReducescatter) {
      Sources sources{};
      for (size_t from = 0; from < size_; ++from) {
        sources[from] = Slot(k, from, rank_, tile);
      }
      return AddUp(sources, k * tile, bytes);
    }
    for (size_t i = 1; i < size_; ++i) {
      const size_t from = (rank_ + size_ - i) % size_;
      char* to = move_.out + from * part_ + k * tile;
      Copy(copying_, to, Slot(k, from, rank_, tile), bytes);
    }
  }

  // By reading.

  bool Direct() {
    self_.Post(move_.given, move_.out);
    self_.Arrive();
    if (which_ == kAllgather || which_ == kAlltoall) CopyOwn(0, part_);
    if (!self_.Await()) return false;
    bool done = true;
    if (which_ == kReducescatter) {
      done = ReadAndAdd();
    } else if (which_ == kBroadcast) {
      done = ReadOrWrite();
    } else {
      for (size_t i = 1; i < size_; ++i) {
        const size_t from = (rank_ + size_ - i) % size_;
        done = done && Read(from, Going(rank_), move_.out + from * part_, part_);
      }
    }
    return self_.Barrier() && done;
  }

  bool ReadAndAdd() {
    const size_t tile = std::max(kLine, move_.piece / size_ / kLine * kLine);
    char* scratch = self_.Scratch(tile * size_);
    for (size_t at = 0; at < part_; at += tile) {
      const size_t bytes = std::min(tile, part_ - at);
      Sources sources{};
      for (size_t i = 1; i < size_; ++i) {
        const size_t from = (rank_ + size_ - i) % size_;
        char* to = scratch + from * tile;
        if (!Read(from, Going(rank_) + at, to, bytes)) return false;
        sources[from] = to;
      }
      AddUp(sources, at, bytes);
    }
    return true;
  }

  // The root writes a share to each other rank, which makes the work of all ranks
  // equal.
  bool ReadOrWrite() {
    const size_t share = move_.way == kReadAndWrite ? part_ / size_ : 0;
    if (rank_ != 0) return Read(0, 0, move_.out, part_ - share);
    for (size_t to = 1; to < size_ && share > 0; ++to) {
      const uint64_t there = self_.PlaceOf(static_cast<int>(to)).out + part_ - share;
      const char* here = move_.given + part_ - share;
      if (!Transfer(process_vm_writev, to, there, const_cast<char*>(here), share)) {
        return false;
      }
    }
    return true;
  }

  bool Read(size_t from, size_t offset, char* to, size_t bytes) const {
    const uint64_t there = self_.PlaceOf(static_cast<int>(from)).given + offset;
    return Transfer(process_vm_readv, from, there, to, bytes);
  }

  using Call = ssize_t (*)(pid_t, const iovec*, unsigned long, const iovec*,
                           unsigned long, unsigned long);

  bool Transfer(Call call, size_t rank, uint64_t there, char* here,
                size_t bytes) const {
    const auto process =
        static_cast<pid_t>(self_.PlaceOf(static_cast<int>(rank)).process);
    for (size_t at = 0; at < bytes;) {
      const iovec local{here + at, bytes - at};
      const iovec remote{reinterpret_cast<void*>(there + at), bytes - at};
      const ssize_t done = call(process, &local, 1, &remote, 1, 0);
      if (done <= 0) return false;
      at += static_cast<size_t>(done);
    }
    return true;
  }

  // Both ways.

  // Slots are never written past the caches, because another rank reads them soon.
  Copying In() const { return copying_ == kStreamed ? kMemcpy : copying_; }

  // Returns the offset, in the input of a rank, of the part that rank `to` receives.
  size_t Going(size_t to) const {
    return which_ == kAlltoall || which_ == kReducescatter ? to * part_ : 0;
  }

  void CopyOwn(size_t at, size_t bytes) {
    Copy(copying_, move_.out + rank_ * part_ + at, move_.given + Going(rank_) + at,
         bytes);
  }

  // Adds the other ranks' `sources` and the input of this rank.
  void AddUp(Sources sources, size_t at, size_t bytes) {
    sources[rank_] = move_.given + Going(rank_) + at;
    if (copying_ == kStreamed) {
      constexpr size_t kBlock = 8 << 10;
      alignas(kLine) char sum[kBlock];
      for (size_t done = 0; done < bytes; done += kBlock) {
        const size_t some = std::min(kBlock, bytes - done);
        kAddFloat[size_ - 1](sources, sum, sum, some, 1.0F);
        CopyPast(move_.out + at + done, sum, some);
        for (size_t rank = 0; rank < size_; ++rank) sources[rank] += kBlock;
      }
      return;
    }
    char* sum = move_.out + at;
    kAddFloat[size_ - 1](sources, sum, sum, bytes, 1.0F);
  }

  Rank& self_;
  const LimitMove& move_;
  const Which which_;
  const Copying copying_;
  const size_t rank_, size_;
  const size_t part_;
};

#endif  // RINGJAX_BENCHMARKS_LIMIT_COLLECTIVES_H_
