// A board: memory that all ranks of one host map, for what many ranks read.
//
// A link is for two; what one rank writes for all others goes here once instead of into
// every link. The board holds, for each rank, counters that only it advances, notes
// (small messages) and areas (for large ones), and knows no collective: what a
// counter means is engine/call/agreement.h's and engine/call/tiles.h's matter. One
// thread uses a board at a time. Values that peers wrote are checked by whoever uses
// them.
#pragma once

#include <memory>
#include <vector>

#include "transport/link.h"
#include "transport/ring_buffer.h"
#include "transport/write_pace.h"

namespace ringjax {

class Board : public Waitable {
 public:
  // A rank's counters, each of which only grows.
  enum Counter { kAgreed, kPosted, kSummed, kFetched, kEnded, kCounters };

  static constexpr size_t kHeaderBytes = 64;  // in front of a note
  static constexpr size_t kTiles = 3;         // of tile_bytes, in an area

  int rank() const { return rank_; }
  int size() const { return size_; }
  size_t note_bytes() const { return note_bytes_; }  // of the largest note
  size_t tile_bytes() const { return tile_bytes_; }
  size_t area_bytes() const { return kTiles * tile_bytes_; }

  // The note of `rank` in this turn: kHeaderBytes, then up to note_bytes. Sets take
  // turns, at least two. Aligned to a cache line.
  std::byte* Note(uint64_t turn, int rank) const;
  // Of a rank, or of all together (rank == size()): area_bytes, aligned to a cache
  // line.
  std::byte* Area(int rank) const;
  // Bytes of the areas that were used so far, alike on all ranks. Going round through
  // the whole area is faster than using its beginning all the time: what the other core
  // has written then comes from the cache that both share, not from that core's own.
  uint64_t used() const { return used_; }
  void Use(uint64_t bytes) { used_ += bytes; }

  // How this rank copies into its notes and areas.
  WritePace& pace() { return pace_; }

  uint64_t mine(Counter counter) const { return mine_[counter]; }
  // Shows the others that a counter has advanced, with all that was written before.
  void Publish(Counter counter, uint64_t value);
  // A peer's counter as it is now.
  uint64_t Look(Counter counter, int rank) const;
  // Looks how far a peer is on its way to `value`, and updates `known`, where it was.
  // kUnavailable if that is impossible: behind `known` or beyond `most`; or if it has
  // gone. What it published before it went still counts.
  Status Follow(Counter counter, int rank, uint64_t value, uint64_t most,
                uint64_t* known) const;

  // Shows the others, for good, that this rank publishes no more. In one order with
  // their counters: who is not seen to have published by a Look after this will find it
  // when it asks Stopped after publishing.
  void Stop();
  // A peer that has stopped; -1: none.
  int Stopped() const;

  // Woken when any counter of a peer advances. Asks to be looked at once more whenever
  // one has since the last time, whichever the caller waits for.
  bool Arm(bool want_read, bool want_write, std::vector<pollfd>* fds) override;
  void Disarm() override;

 protected:
  // `block` is zero at first and must stay until after Close.
  Board(std::byte* block, int rank, int size, size_t tile_bytes);
  // Tells the peers that this rank is gone; destructors of derived classes call it.
  void Close();

 private:
  struct Words {  // of one rank; written by it alone, except `asleep`
    alignas(kLineBytes) uint64_t counters[kCounters];
    alignas(kLineBytes) uint32_t asleep;
    uint32_t closed, stopped;
  };

  virtual void RingPeer(int rank) = 0;

  Words* words_;
  std::byte* notes_;
  std::byte* areas_;
  const int rank_, size_;
  const size_t note_bytes_;
  const uint64_t note_sets_;
  const size_t tile_bytes_;
  uint64_t mine_[kCounters] = {};
  uint64_t used_ = 0;
  WritePace pace_;
  std::vector<Words> seen_;  // the words of each rank when Arm looked last

  friend size_t BoardBytes(int size, size_t tile_bytes);
};

// Of the memory of a board. `tile_bytes` is a positive multiple of 4096.
size_t BoardBytes(int size, size_t tile_bytes);
bool IsTileSize(size_t tile_bytes);

// Between processes: `memfd` was sized with BoardBytes and sealed by who made it;
// doorbells[r] is rank r's eventfd (ignored for this rank). Takes all descriptors, also
// on failure.
Result<std::unique_ptr<Board>> MakeShmBoard(int memfd, int rank, size_t tile_bytes,
                                            const std::vector<int>& doorbells);

// In-process, for threads as ranks. doorbells[r] must outlive board r.
std::vector<std::unique_ptr<Board>> MakeLocalBoards(
    size_t tile_bytes, const std::vector<Doorbell*>& doorbells);

}  // namespace ringjax
