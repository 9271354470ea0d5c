// Post, sum, fetch. See tiles.h.
#include "engine/call/tiles.h"

#include <algorithm>
#include <string>

#include "base/float_mode.h"
#include "engine/call/loan_pace.h"
#include "engine/call/tile_order.h"
#include "transport/copy.h"

namespace ringjax {
namespace {

// Results as long as this, to other memory than the values came from, are not worth a
// place in the caches.
constexpr uint64_t kLong = 8 << 20;

constexpr size_t kAllPieces = ~size_t{0};

class Allreduce : public Tiles {
 public:
  Allreduce(const Memory& memory, uint64_t count, const Tiling& tiling,
            const Arithmetic& a, const Lane& lane, Waiter* waiter, bool lends)
      : Tiles(memory, tiling, a, lane, waiter, true, lends), count_(count) {}

  void FetchAll() {
    for (uint64_t k = 0; k < tiles_; ++k) {
      const Range tile = Tile(k);
      ForOthers(tile, [&](Range range) { FetchFromSlot(range, tile, k); });
    }
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

  Status Sum(uint64_t k) override {
    const FloatMode mode;  // one for all blocks
    const Range tile = Tile(k), part = Part(tile, rank_);
    std::byte* sums = Slot(k, size_);
    for (uint64_t at = part.begin; at < part.end;) {
      const uint64_t most = std::min(Block(), part.end - at) * width_;
      const Span out = memory_.out->At(at * width_, most);
      const Span own = memory_.in->At(at * width_, out.bytes);
      const uint64_t n = own.bytes / width_, offset = (at - tile.begin) * wire_;
      const bool past = Past(out, own) && !loans_.mine();
      std::byte* sum = past ? sums + offset : out.data;
      if (!Add(sum, own.data, k, offset, at, n)) return failure_;
      at += n;
      if (loans_.mine()) continue;
      if (past)
        CopyPast(out.data, sum, n * width_);
      else if (a_.compressed())
        Encode(sums + offset, sum, n, a_, false);
      else
        CopyBytes(sums + offset, sum, n * width_);
    }
    return OkStatus();
  }

  Status Fetch(uint64_t k) override {
    const Range tile = Tile(k);
    if (!loans_.any()) {
      ForOthers(tile, [&](Range range) { FetchFromSlot(range, tile, k); });
      return OkStatus();
    }
    for (int peer = 0; peer < size_; ++peer) {
      const Range part = Part(tile, peer);
      if (peer == rank_ || part.begin == part.end) continue;
      if (!loans_.Lends(peer)) {
        FetchFromSlot(part, tile, k);
        continue;
      }
      to_.clear();
      memory_.out->Pieces(part.begin * width_, (part.end - part.begin) * width_,
                          kAllPieces, &to_);
      RJ_TRY(loans_.Results(peer, part.begin * width_, to_));
    }
    return OkStatus();
  }

  void FetchFromSlot(Range range, Range tile, uint64_t k) const {
    const std::byte* from = Slot(k, size_) + (range.begin - tile.begin) * wire_;
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
  }

  const uint64_t count_;
  std::vector<iovec> to_;
};

// A slot has a part for each rank, of which the owner's own stays empty.
class Reducescatter : public Tiles {
 public:
  Reducescatter(const Memory& memory, const std::vector<uint64_t>& counts,
                const Tiling& tiling, const Arithmetic& a, const Lane& lane,
                Waiter* waiter, bool lends)
      : Tiles(memory, tiling, a, lane, waiter, false, lends), counts_(counts) {}

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

  Status Sum(uint64_t k) override {
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
      const uint64_t offset = (r * tile_ + at - part.begin) * wire_;
      if (!Add(out.data, own.data, k, offset, before + at, n)) return failure_;
      at += n;
    }
    return OkStatus();
  }

  const std::vector<uint64_t>& counts_;
};

// Whether this rank lends what it has of such a message.
bool Lends(const Memory& memory, const Tiling& tiling, const Arithmetic& a,
           const Lane& lane, bool scatters) {
  const uint64_t bytes = memory.in->bytes();
  if (!IsPlain(a, true)) return false;
  // Sums of what fits the slots stay on the board, see SummedAt.
  if (!scatters && lane.ends_together && tiling.tiles <= tiling.sets) return false;
  if (bytes >= least_lent_tiles) return true;
  if (bytes < LoanPace::kLeast) return false;
  return lane.board->Get(Board::kWish, 0) >> LoanPace::Kind(scatters, bytes) & 1;
}

}  // namespace

Status AllreduceInTiles(const Memory& memory, uint64_t count, const Arithmetic& a,
                        const Lane& lane, Waiter* waiter) {
  const Tiling tiling = CutIntoTiles(count, 1, a, *lane.board);
  const bool lends = Lends(memory, tiling, a, lane, false);
  return Allreduce(memory, count, tiling, a, lane, waiter, lends).Loop();
}

Status ReducescatterInTiles(const Memory& memory, const std::vector<uint64_t>& counts,
                            const Arithmetic& a, const Lane& lane, Waiter* waiter,
                            bool* could) {
  const uint64_t longest = *std::max_element(counts.begin(), counts.end());
  const Tiling tiling = CutIntoTiles(longest, counts.size(), a, *lane.board);
  *could = longest == 0 || tiling.tile > 0;
  if (tiling.tiles == 0) return OkStatus();
  const bool lends = Lends(memory, tiling, a, lane, true);
  return Reducescatter(memory, counts, tiling, a, lane, waiter, lends).Loop();
}

uint64_t SummedAt(uint64_t count, const Arithmetic& a, const Board& board) {
  const Tiling tiling = CutIntoTiles(count, 1, a, board);
  if (tiling.tiles > tiling.sets) return 0;  // a slot is used twice
  return board.mine(Board::kFetched) + tiling.tiles;
}

void FetchTiles(const Memory& memory, uint64_t count, const Arithmetic& a,
                const Lane& lane) {
  const Tiling tiling = CutIntoTiles(count, 1, a, *lane.board);
  Allreduce(memory, count, tiling, a, lane, nullptr, false).FetchAll();
}

}  // namespace ringjax
