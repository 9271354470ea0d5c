// What all sums over a board have in common: how a message is cut into tiles, the order
// of things, and who waits for whom. See tiles.h.
#pragma once

#include <algorithm>
#include <vector>

#include "engine/call/executor.h"
#include "engine/call/tile_loans.h"
#include "transport/board.h"

namespace ringjax {

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
Tiling CutIntoTiles(uint64_t count, uint64_t blocks, const Arithmetic& a,
                    const Board& board);

class Tiles {
 public:
  // `fetches`: all ranks need all sums; else they are for who makes them. `lends`: this
  // rank would rather not post.
  Tiles(const Memory& memory, const Tiling& tiling, const Arithmetic& a,
        const Lane& lane, Waiter* waiter, bool fetches, bool lends);
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
  virtual ~Tiles() = default;

  Status Loop();

 protected:
  virtual void Post(uint64_t k) = 0;
  virtual Status Sum(uint64_t k) = 0;
  virtual Status Fetch(uint64_t) { return OkStatus(); }  // if it fetches

  // Where tile `k` is, of a rank or (rank == size_) of all.
  std::byte* Slot(uint64_t k, int rank) const {
    return board_.Area(rank) + (first_ + k) % sets_ * slot_;
  }
  // This rank's values of `range`, as they travel.
  void Write(std::byte* to, Range range) const;
  // Elements that are added up at a time.
  uint64_t Block() const;
  // `n` elements of all: `mine`, and those of the others, which are at `offset` in
  // their slots, or begin with element `at` of their values. False: see `failure_`.
  bool Add(std::byte* sum, const void* mine, uint64_t k, uint64_t offset, uint64_t at,
           uint64_t n);

  const Memory& memory_;
  const Arithmetic& a_;
  const Lane& lane_;
  Waiter* waiter_;
  Board& board_;
  const int rank_, size_;
  const uint64_t width_, wire_;
  const bool fetches_;
  const uint64_t tile_, tiles_, slot_, sets_;  // as in Tiling
  TileLoans loans_;
  Status failure_;  // a Status for each block would take as long as its sum

 private:
  // What a peer lends, here; null: see `failure_`.
  const std::byte* Lent(int peer, uint64_t at, uint64_t n);
  // All have posted their first tiles, and said whether they lend.
  Status Begin();
  // What was lent is the caller's again once nobody reads it; it waits, or we do.
  Status End();
  // For rank 0's choice.
  void Time();

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
  Status Passed(Board::Counter counter, uint64_t value, bool* ready);

  uint64_t& Known(Board::Counter counter, int rank) {
    return known_[static_cast<size_t>(rank) * Board::kCounters + counter];
  }
  // As far as a peer can be, given how far this rank is.
  uint64_t Most(Board::Counter counter) const;

  const uint64_t first_;                            // the first slot to be used
  const uint64_t base_;                             // tiles of all messages before
  std::vector<uint64_t> known_;                     // counters of the peers
  uint64_t posted_ = 0, summed_ = 0, fetched_ = 0;  // tiles
  int late_ = -1;                                   // the peer that was waited for last
  Clock::time_point began_;
};

}  // namespace ringjax
