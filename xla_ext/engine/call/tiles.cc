// Post, sum, fetch. See tiles.h.
#include "engine/call/tiles.h"

#include <algorithm>
#include <string>

#include "base/failpoint.h"
#include "base/float_mode.h"
#include "transport/board.h"
#include "transport/copy.h"

namespace ringjax {
namespace {

// Several sources are added up in pieces that stay in the first-level cache.
constexpr uint64_t kTileBlock = 8 << 10;
// Results as long as this, to other memory than the values came from, are not worth a
// place in the caches.
constexpr uint64_t kLong = 8 << 20;

// What is not copied into a slot as it is.
alignas(64) thread_local std::byte scratch[kTileBlock];

struct Range {
  uint64_t begin, end;  // elements
};

// How a message is cut.
struct Tiling {
  uint64_t tile = 0;   // elements of a tile; of each rank's in it, if it is scattered
  uint64_t tiles = 0;  // of this message
  uint64_t slot = 0;   // bytes
  uint64_t sets = 0;   // slots in an area
};

// `count` elements, of which each of `blocks` has as much of a tile as the others. A
// message that fits one tile is one: going back and forth costs more than working at
// the same time gains.
Tiling Cut(uint64_t count, uint64_t blocks, const Arithmetic& a, const Board& board) {
  const uint64_t wire = Width(a.wire);
  const uint64_t lines = (count * wire + kLineBytes - 1) / kLineBytes;
  const uint64_t most = board.tile_bytes() / blocks / kLineBytes;
  Tiling t;
  t.tile = std::min(most, lines) * kLineBytes / wire;
  if (t.tile == 0) return t;
  t.tiles = (count + t.tile - 1) / t.tile;
  t.slot = t.tile * blocks * wire;
  t.sets = board.area_bytes() / t.slot;
  return t;
}

// The order of things, and who waits for whom.
class Tiles {
 public:
  Tiles(const Memory& memory, const Tiling& tiling, const Arithmetic& a,
        const Lane& lane, Waiter* waiter, bool fetches)
      : memory_(memory),
        a_(a),
        lane_(lane),
        waiter_(waiter),
        board_(*lane.board),
        rank_(board_.rank()),
        size_(board_.size()),
        width_(Width(a.dtype)),
        wire_(Width(a.wire)),
        fetches_(fetches),
        tile_(tiling.tile),
        tiles_(tiling.tiles),
        slot_(tiling.slot),
        sets_(tiling.sets),
        first_(board_.used() / slot_),
        base_(board_.mine(Board::kFetched)),
        known_(static_cast<size_t>(size_) * Board::kCounters, 0) {}
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
  virtual ~Tiles() = default;

  Status Loop() {
    uint64_t posted = 0, summed = 0, fetched = 0;
    while (fetched < tiles_) {
      bool ready = false;
      late_ = -1;
      if (summed < posted) {
        RJ_TRY(Reached(Board::kPosted, summed + 1, &ready));
        if (ready) RJ_TRY(Freed(Board::kFetched, summed, &ready));
        if (ready) {
          Sum(summed++);
          board_.Publish(Board::kSummed, base_ + summed);
          if (!fetches_) board_.Publish(Board::kFetched, base_ + ++fetched);
        }
      }
      if (!ready && fetched < summed) {
        RJ_TRY(Reached(Board::kSummed, fetched + 1, &ready));
        if (ready) {
          Fetch(fetched++);
          board_.Publish(Board::kFetched, base_ + fetched);
        }
      }
      if (!ready && posted < tiles_) {
        RJ_TRY(Freed(Board::kSummed, posted, &ready));
        if (ready) {
          Post(posted++);
          board_.Publish(Board::kPosted, base_ + posted);
        }
      }
      if (ready) {
        RJ_FAILPOINT(kMoving);
        waiter_->Progressed();
        continue;
      }
      RJ_TRY(waiter_->Idle(
          [this] { return std::vector<Waiter::Interest>{{&board_, true, false}}; }));
      RJ_TRY(CheckStall(
          lane_, *waiter_, [this] { return std::vector{late_}; }, kNotMoved));
    }
    board_.Use(tiles_ * slot_);
    return OkStatus();
  }

 protected:
  virtual void Post(uint64_t k) = 0;
  virtual void Sum(uint64_t k) = 0;
  virtual void Fetch(uint64_t) {}  // if it fetches

  // Where tile `k` is, of a rank or (rank == size_) of all.
  std::byte* Slot(uint64_t k, int rank) const {
    return board_.Area(rank) + (first_ + k) % sets_ * slot_;
  }

  // This rank's values of `range`, as they travel.
  void Write(std::byte* to, Range range) const {
    const bool plain = IsPlain(a_, true);
    const uint64_t most = plain ? range.end - range.begin : Block();
    for (uint64_t at = range.begin; at < range.end;) {
      const Span from =
          memory_.in->At(at * width_, std::min(most, range.end - at) * width_);
      const uint64_t n = from.bytes / width_;
      if (!plain) Encode(scratch, from.data, n, a_, true);
      board_.pace().Copy(to, plain ? from.data : scratch, n * wire_);
      to += n * wire_;
      at += n;
    }
  }

  // Elements of a piece that stays in the first-level cache.
  uint64_t Block() const { return kTileBlock / std::max(width_, wire_); }

  // `n` elements of all: `mine`, and those at `offset` in the slots of the others.
  void Add(std::byte* sum, const void* mine, uint64_t k, uint64_t offset,
           uint64_t n) const {
    for (int i = 1; i < size_; ++i) {
      // Ranks start with different peers, as in direct.cc.
      const int peer = (rank_ + i) % size_;
      Combine(sum, mine, Slot(k, peer) + offset, n, a_, i == 1, i == size_ - 1);
      mine = sum;
    }
  }

  const Memory& memory_;
  const Arithmetic& a_;
  const Lane& lane_;
  Waiter* waiter_;
  Board& board_;
  const int rank_, size_;
  const uint64_t width_, wire_;
  const bool fetches_;                         // or sums are for who makes them
  const uint64_t tile_, tiles_, slot_, sets_;  // as in Tiling

 private:
  // Whether all peers have done `tiles` tiles of this message.
  Status Reached(Board::Counter counter, uint64_t tiles, bool* ready) {
    return Passed(counter, base_ + tiles, ready);
  }
  // Whether the slots that tile `k` needs have been left by all. Those of the message
  // before may lie anywhere.
  Status Freed(Board::Counter counter, uint64_t k, bool* ready) {
    if (k < sets_) return Passed(Board::kFetched, base_, ready);
    return Passed(counter, base_ + k + 1 - sets_, ready);
  }

  Status Passed(Board::Counter counter, uint64_t value, bool* ready) {
    *ready = false;
    for (int r = 0; r < size_; ++r) {
      if (r == rank_ || Known(counter, r) >= value) continue;
      RJ_TRY(board_.Follow(counter, r, value, Most(counter), &Known(counter, r)));
      if (Known(counter, r) >= value) continue;
      // The first look of a pass is at the earliest phase: who is late there is to
      // blame, and not a peer that waits for that one itself.
      if (late_ < 0) late_ = r;
      return OkStatus();
    }
    *ready = true;
    return OkStatus();
  }

  uint64_t& Known(Board::Counter counter, int rank) {
    return known_[static_cast<size_t>(rank) * Board::kCounters + counter];
  }

  // As far as a peer can be, given how far this rank is.
  uint64_t Most(Board::Counter counter) const {
    if (counter == Board::kPosted) return board_.mine(Board::kSummed) + sets_;
    const bool sums = counter == Board::kSummed || !fetches_;
    return board_.mine(sums ? Board::kPosted : Board::kSummed);
  }

  const uint64_t first_;         // the first slot to be used
  const uint64_t base_;          // tiles of all messages before
  std::vector<uint64_t> known_;  // counters of the peers
  int late_ = -1;                // the peer that is waited for in the earliest phase
};

class Allreduce : public Tiles {
 public:
  Allreduce(const Memory& memory, uint64_t count, const Arithmetic& a, const Lane& lane,
            Waiter* waiter)
      : Tiles(memory, Cut(count, 1, a, *lane.board), a, lane, waiter, true),
        count_(count) {}

  void FetchAll() {
    for (uint64_t k = 0; k < tiles_; ++k) Fetch(k);
  }

 private:
  Range Tile(uint64_t k) const {
    return {k * tile_, std::min(count_, (k + 1) * tile_)};
  }

  // What `rank` adds up of a tile.
  Range Part(Range tile, int rank) const {
    const uint64_t line = kLineBytes / wire_, ranks = static_cast<uint64_t>(size_);
    const uint64_t lines = (tile.end - tile.begin + line - 1) / line;
    const uint64_t each = (lines + ranks - 1) / ranks * line;
    const auto r = static_cast<uint64_t>(rank);
    return {std::min(tile.end, tile.begin + r * each),
            std::min(tile.end, tile.begin + (r + 1) * each)};
  }

  // Calls visit(range) for what other ranks add up: before and behind our part.
  template <typename Visit>
  void ForOthers(Range tile, Visit visit) const {
    const Range own = Part(tile, rank_);
    if (tile.begin < own.begin) visit(Range{tile.begin, own.begin});
    if (own.end < tile.end) visit(Range{own.end, tile.end});
  }

  bool Past(const Span& out, const Span& in) const {
    return count_ * width_ >= kLong && out.data != in.data && !a_.compressed();
  }

  void Post(uint64_t k) override {
    const Range tile = Tile(k);
    std::byte* slot = Slot(k, rank_);
    ForOthers(tile, [&](Range range) {
      Write(slot + (range.begin - tile.begin) * wire_, range);
    });
  }

  void Sum(uint64_t k) override {
    const FloatMode mode;  // one for all blocks
    const Range tile = Tile(k), part = Part(tile, rank_);
    for (uint64_t at = part.begin; at < part.end;) {
      const uint64_t most = std::min(Block(), part.end - at) * width_;
      const Span out = memory_.out->At(at * width_, most);
      const Span own = memory_.in->At(at * width_, out.bytes);
      const uint64_t n = own.bytes / width_, offset = (at - tile.begin) * wire_;
      SumBlock(out.data, own.data, k, offset, n, Past(out, own));
      at += n;
    }
  }

  // `past`: the result stays out of the caches.
  void SumBlock(std::byte* out, const void* own, uint64_t k, uint64_t offset,
                uint64_t n, bool past) {
    const bool far = board_.pace().went_past();
    std::byte* const slot = Slot(k, size_) + offset;
    std::byte* shown = far ? scratch : slot;  // what others fetch
    Add(past ? shown : out, own, k, offset, n);
    if (past)
      CopyPast(out, shown, n * width_);
    else if (a_.compressed())
      Encode(shown, out, n, a_, false);
    else
      shown = out;
    if (far)
      CopyPast(slot, shown, n * wire_);
    else if (shown != slot)
      CopyBytes(slot, shown, n * wire_);
  }

  void Fetch(uint64_t k) override {
    const Range tile = Tile(k);
    const std::byte* sums = Slot(k, size_);
    ForOthers(tile, [&](Range range) {
      const std::byte* from = sums + (range.begin - tile.begin) * wire_;
      for (uint64_t at = range.begin; at < range.end;) {
        const Span to = memory_.out->At(at * width_, (range.end - at) * width_);
        const uint64_t n = to.bytes / width_;
        if (a_.compressed())
          Decode(to.data, from, n, a_);
        else if (Past(to, memory_.in->At(at * width_, to.bytes)))
          CopyPast(to.data, from, to.bytes);
        else
          CopyBytes(to.data, from, to.bytes);
        from += n * wire_;
        at += n;
      }
    });
  }

  const uint64_t count_;
};

// A slot has a part for each rank, of which the owner's own stays empty.
class Reducescatter : public Tiles {
 public:
  Reducescatter(const Memory& memory, const std::vector<uint64_t>& counts,
                const Tiling& tiling, const Arithmetic& a, const Lane& lane,
                Waiter* waiter)
      : Tiles(memory, tiling, a, lane, waiter, false), counts_(counts) {}

 private:
  // Elements of tile `k` that are for `rank`, counted from its first.
  Range Part(uint64_t k, size_t rank) const {
    return {std::min(counts_[rank], k * tile_),
            std::min(counts_[rank], (k + 1) * tile_)};
  }

  void Post(uint64_t k) override {
    uint64_t before = 0;
    for (size_t r = 0; r < counts_.size(); before += counts_[r++]) {
      if (r == static_cast<size_t>(rank_)) continue;
      const Range part = Part(k, r);
      Write(Slot(k, rank_) + r * tile_ * wire_,
            {before + part.begin, before + part.end});
    }
  }

  void Sum(uint64_t k) override {
    const FloatMode mode;
    const auto r = static_cast<size_t>(rank_);
    uint64_t before = 0;
    for (size_t other = 0; other < r; ++other) before += counts_[other];
    const Range part = Part(k, r);
    for (uint64_t at = part.begin; at < part.end;) {
      const uint64_t most = std::min(Block(), part.end - at) * width_;
      const Span out = memory_.out->At(at * width_, most);
      const Span own = memory_.in->At((before + at) * width_, out.bytes);
      const uint64_t n = own.bytes / width_;
      Add(out.data, own.data, k, (r * tile_ + at - part.begin) * wire_, n);
      at += n;
    }
  }

  const std::vector<uint64_t>& counts_;
};

}  // namespace

Status AllreduceInTiles(const Memory& memory, uint64_t count, const Arithmetic& a,
                        const Lane& lane, Waiter* waiter) {
  return Allreduce(memory, count, a, lane, waiter).Loop();
}

Status ReducescatterInTiles(const Memory& memory, const std::vector<uint64_t>& counts,
                            const Arithmetic& a, const Lane& lane, Waiter* waiter,
                            bool* could) {
  const uint64_t longest = *std::max_element(counts.begin(), counts.end());
  const Tiling tiling = Cut(longest, counts.size(), a, *lane.board);
  *could = longest == 0 || tiling.tile > 0;
  if (tiling.tiles == 0) return OkStatus();
  return Reducescatter(memory, counts, tiling, a, lane, waiter).Loop();
}

uint64_t SummedAt(uint64_t count, const Arithmetic& a, const Board& board) {
  const Tiling tiling = Cut(count, 1, a, board);
  if (tiling.tiles > tiling.sets) return 0;  // a slot is used twice
  return board.mine(Board::kFetched) + tiling.tiles;
}

void FetchTiles(const Memory& memory, uint64_t count, const Arithmetic& a,
                const Lane& lane) {
  Allreduce(memory, count, a, lane, nullptr).FetchAll();
}

}  // namespace ringjax
