// Post, sum, fetch; and notes. See tiles.h.
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
constexpr uint64_t kBlock = 8 << 10;
// Results as long as this, to other memory than the values came from, are not worth a
// place in the caches.
constexpr uint64_t kLong = 8 << 20;

struct Range {
  uint64_t begin, end;  // elements
};

// How a message is cut.
struct Tiling {
  uint64_t tile;   // elements of a tile
  uint64_t tiles;  // of this message
  uint64_t sets;   // slots in an area

  // A message that fits one tile is one: going back and forth costs more than working
  // at the same time gains.
  Tiling(uint64_t count, const Arithmetic& a, const Board& board) {
    const uint64_t wire = Width(a.wire);
    const uint64_t lines = (count * wire + kLineBytes - 1) / kLineBytes;
    tile = std::min<uint64_t>(board.tile_bytes(), lines * kLineBytes) / wire;
    tiles = (count + tile - 1) / tile;
    sets = board.area_bytes() / (tile * wire);
  }
};

class Run {
 public:
  Run(const Memory& memory, uint64_t count, const Arithmetic& a, const Lane& lane,
      Waiter* waiter)
      : memory_(memory),
        a_(a),
        lane_(lane),
        waiter_(waiter),
        board_(*lane.board),
        rank_(board_.rank()),
        size_(board_.size()),
        width_(Width(a.dtype)),
        wire_(Width(a.wire)),
        count_(count),
        tiling_(count, a, board_),
        tile_(tiling_.tile),
        tiles_(tiling_.tiles),
        sets_(tiling_.sets),
        first_(board_.used() / (tile_ * wire_)),
        base_(board_.mine(Board::kFetched)),
        known_(static_cast<size_t>(size_) * Board::kCounters, 0) {}

  Status Loop() {
    uint64_t posted = 0, summed = 0, fetched = 0;
    while (fetched < tiles_) {
      bool ready = false;
      if (summed < posted) {
        RJ_TRY(Reached(Board::kPosted, summed + 1, &ready));
        if (ready) RJ_TRY(Freed(Board::kFetched, summed, &ready));
        if (ready) {
          Sum(summed++);
          board_.Publish(Board::kSummed, base_ + summed);
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
    board_.Use(tiles_ * tile_ * wire_);
    return OkStatus();
  }

  void FetchAll() {
    for (uint64_t k = 0; k < tiles_; ++k) Fetch(k);
  }

 private:
  // Where tile `k` is, of a rank or (rank == size_) of all.
  std::byte* Slot(uint64_t k, int rank) const {
    return board_.Area(rank) + (first_ + k) % sets_ * tile_ * wire_;
  }

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
      late_ = r;
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
    return board_.mine(counter == Board::kSummed ? Board::kPosted : Board::kSummed);
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

  void Post(uint64_t k) {
    const Range tile = Tile(k);
    std::byte* slot = Slot(k, rank_);
    const bool plain = IsPlain(a_, true);
    ForOthers(tile, [&](Range range) {
      std::byte* to = slot + (range.begin - tile.begin) * wire_;
      for (uint64_t at = range.begin; at < range.end;) {
        const Span from = memory_.in->At(at * width_, (range.end - at) * width_);
        const uint64_t n = from.bytes / width_;
        if (plain)
          CopyBytes(to, from.data, from.bytes);
        else
          Encode(to, from.data, n, a_, true);
        to += n * wire_;
        at += n;
      }
    });
  }

  void Sum(uint64_t k) {
    const FloatMode mode;  // one for all blocks
    const Range tile = Tile(k), part = Part(tile, rank_);
    const uint64_t block = kBlock / std::max(width_, wire_);
    std::byte* sums = Slot(k, size_);
    for (uint64_t at = part.begin; at < part.end;) {
      const uint64_t most = std::min(block, part.end - at) * width_;
      const Span out = memory_.out->At(at * width_, most);
      const Span own = memory_.in->At(at * width_, out.bytes);
      const uint64_t n = own.bytes / width_, offset = (at - tile.begin) * wire_;
      const bool past = Past(out, own);
      std::byte* sum = past ? sums + offset : out.data;
      const void* mine = own.data;
      for (int i = 1; i < size_; ++i) {
        // Ranks start with different peers, as in direct.cc.
        const int peer = (rank_ + i) % size_;
        Combine(sum, mine, Slot(k, peer) + offset, n, a_, i == 1, i == size_ - 1);
        mine = sum;
      }
      if (past)
        CopyPast(out.data, sum, n * width_);
      else if (a_.compressed())
        Encode(sums + offset, sum, n, a_, false);
      else
        CopyBytes(sums + offset, sum, n * width_);
      at += n;
    }
  }

  void Fetch(uint64_t k) {
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

  const Memory& memory_;
  const Arithmetic& a_;
  const Lane& lane_;
  Waiter* waiter_;
  Board& board_;
  const int rank_, size_;
  const uint64_t width_, wire_, count_;
  const Tiling tiling_;
  const uint64_t tile_, tiles_, sets_;  // as there
  const uint64_t first_;                // the first slot to be used
  const uint64_t base_;                 // tiles of all messages before
  std::vector<uint64_t> known_;         // counters of the peers
  int late_ = -1;                       // the peer that was waited for last
};

}  // namespace

Status AllreduceInTiles(const Memory& memory, uint64_t count, const Arithmetic& a,
                        const Lane& lane, Waiter* waiter) {
  return Run(memory, count, a, lane, waiter).Loop();
}

uint64_t SummedAt(uint64_t count, const Arithmetic& a, const Board& board) {
  const Tiling tiling(count, a, board);
  if (tiling.tiles > tiling.sets) return 0;  // a slot is used twice
  return board.mine(Board::kFetched) + tiling.tiles;
}

void FetchTiles(const Memory& memory, uint64_t count, const Arithmetic& a,
                const Lane& lane) {
  Run(memory, count, a, lane, nullptr).FetchAll();
}

bool FitsNote(uint64_t wire_bytes) { return wire_bytes <= Board::kNoteBytes; }

void PutNote(const Spans& in, const Arithmetic& a, const Lane& lane) {
  Board& board = *lane.board;
  std::byte* to = board.Note(board.mine(Board::kAgreed) + 1, board.rank());
  to += Board::kHeaderBytes;
  for (uint64_t at = 0; at < in.bytes();) {
    const Span from = in.At(at, in.bytes() - at);
    const uint64_t n = from.bytes / Width(a.dtype);
    Encode(to, from.data, n, a, true);
    to += n * Width(a.wire);
    at += from.bytes;
  }
}

void ReduceNotes(const Spans& out, const Arithmetic& a, const Lane& lane) {
  Board& board = *lane.board;
  const uint64_t turn = board.mine(Board::kAgreed);
  uint64_t offset = Board::kHeaderBytes;
  for (uint64_t at = 0; at < out.bytes();) {
    const Span to = out.At(at, out.bytes() - at);
    const uint64_t n = to.bytes / Width(a.dtype);
    Decode(to.data, board.Note(turn, 0) + offset, n, a);
    for (int r = 1; r < board.size(); ++r)
      Combine(to.data, to.data, board.Note(turn, r) + offset, n, a, false,
              r == board.size() - 1);
    offset += n * Width(a.wire);
    at += to.bytes;
  }
}

}  // namespace ringjax
