// A shared segment: memory that all ranks of one host have mapped, for data that many
// ranks read. MPI-3 calls such memory a shared window, Open MPI a segment (`sm`).
//
// A link is for two ranks. Data that one rank writes for all others are written once,
// into the shared segment, and not into every link. The segment holds for each rank
// counters that only this rank advances, slots for inline data (short calls), and an
// area for the tiles of long messages. This code knows nothing about collectives:
// engine/call/agreement.h and engine/call/tiles.h define what the counters mean.
//
// One thread of a rank uses a SharedSegment at a time. Code that uses a value written
// by a peer must check the value.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "transport/adaptive_copier.h"
#include "transport/doorbell.h"
#include "transport/link.h"
#include "transport/ring_buffer.h"

namespace ringjax {

class SharedSegment final : public Waitable {
 public:
  // The counters of a rank, none of which ever decreases. kAgreed and kEnded count
  // calls; the others count tiles that have passed a phase (engine/call/tiles.h).
  enum Counter { kAgreed, kCopiedIn, kReduced, kFinished, kEnded, kCounters };

  static constexpr size_t kHeaderBytes = 64;  // header in front of inline data
  static constexpr size_t kTiles = 3;         // tiles in an area

  // The segment is in the memory of the doorbell, which all ranks of the communicator
  // share. The doorbell must outlive this object.
  explicit SharedSegment(Doorbell* doorbell);
  ~SharedSegment() override;

  int rank() const { return rank_; }
  int size() const { return size_; }
  size_t inline_bytes() const { return inline_bytes_; }  // the most that a slot holds
  size_t tile_bytes() const { return tile_bytes_; }
  size_t area_bytes() const { return kTiles * tile_bytes_; }

  // Returns the slot of `rank` for the inline data of the call that raises kAgreed to
  // `turn`: kHeaderBytes bytes, then up to inline_bytes() bytes. Successive turns use
  // successive sets of slots, of which there are at least two. Aligned to a cache line.
  std::byte* InlineSlot(uint64_t turn, int rank) const;
  // Returns the area of `rank`; for rank == size() the area for results that all ranks
  // read. An area has area_bytes() bytes and is aligned to a cache line.
  std::byte* Area(int rank) const;
  // Bytes of an area that all messages so far have used; equal on all ranks. A message
  // begins where the last message ended, and not at the beginning of the area. So the
  // lines that another core wrote earlier have moved to the cache that the cores share,
  // from which they are read faster than from the cache of that core.
  uint64_t cursor() const { return cursor_; }
  void AdvanceCursor(uint64_t bytes) { cursor_ += bytes; }

  // Makes the copies of this rank into its inline slots and its area.
  AdaptiveCopier& copier() { return copier_; }

  // A counter of this rank, as it was last published.
  uint64_t own(Counter counter) const { return own_[counter]; }
  // Advances a counter of this rank, and wakes the peers that sleep. A peer that sees
  // `value` also sees all bytes that this rank has written before.
  void Publish(Counter counter, uint64_t value);
  // Loads a counter of a peer. Does not check the value, which the peer controls.
  uint64_t Look(Counter counter, int rank) const;
  // Loads a peer's counter into `*known`, which holds the value loaded before. Fails
  // with kUnavailable if the counter is impossible (less than `*known` or more than
  // `most`), or if the peer has closed before its counter reached `value`.
  Status Poll(Counter counter, int rank, uint64_t value, uint64_t most,
              uint64_t* known) const;

  // Marks this rank, for good, as one that publishes no more. Sequentially consistent
  // with the counters: if a Look after Stop misses a peer's update, then the peer's
  // next Stopped() sees the mark.
  void Stop();
  // Returns the lowest peer that has called Stop, or -1 if no peer has called Stop.
  int Stopped() const;

  // Announces that this rank shuts down cleanly after `finished` calls. Any thread may
  // call it.
  void Leave(uint64_t finished);
  // The calls that a peer had finished before it shut down cleanly; empty if it has
  // not.
  std::optional<uint64_t> FinishedOf(int rank) const;

  // Requests a wake-up for each advance of any counter of any peer, and for a peer that
  // closes. Returns true if a counter has advanced or a peer has closed since the last
  // Arm.
  bool Arm(bool want_read, bool want_write, std::vector<pollfd>* fds) override;
  void Disarm() override;
  // Returns a Waitable that wakes this rank only when the sum of `counter` over all
  // ranks has reached size() * `value`, or when a peer closes. So a rank that waits for
  // all ranks is woken once, and not each time that a rank arrives. A rank that is
  // ahead adds more than `value`, so the sum may be reached before all ranks are there.
  // From then on, each advance wakes this rank, if every wait for `value` calls AllAt.
  Waitable* AllAt(Counter counter, uint64_t value);

 private:
  // The words of one rank. Only this rank writes them, except that a peer clears
  // `asleep` when it wakes the rank.
  struct Words {
    alignas(kLineBytes) uint64_t counters[kCounters];
    // kAwake, kAny, or kAll + the counter whose sum over all ranks must reach `sum`.
    alignas(kLineBytes) uint32_t asleep;
    uint32_t stopped;
    uint64_t sum;
    uint64_t left;  // 1 + the calls that this rank had finished when it left; or 0
  };
  enum Asleep : uint32_t { kAwake, kAny, kAll };
  // Sums over all ranks, which all ranks add to.
  struct Sums {
    alignas(kLineBytes) uint64_t counters[kCounters];  // sums of the ranks' counters
    uint32_t closed;                                   // how many ranks have closed
  };
  static_assert(sizeof(Sums) % kLineBytes == 0);
  class Arrivals final : public Waitable {
   public:
    explicit Arrivals(SharedSegment* segment) : segment_(segment) {}
    bool Arm(bool, bool, std::vector<pollfd>*) override {
      return segment_->ArmForAll();
    }
    void Disarm() override { segment_->Disarm(); }

   private:
    SharedSegment* segment_;
  };

  bool ArmForAll();

  Doorbell* const doorbell_;
  Sums* sums_;
  Words* words_;
  std::byte* inline_slots_;
  std::byte* areas_;
  const int rank_, size_;
  const size_t inline_bytes_;
  const uint64_t inline_sets_;
  const size_t tile_bytes_;
  uint64_t own_[kCounters] = {};
  uint64_t cursor_ = 0;
  AdaptiveCopier copier_;
  std::vector<Words> seen_;       // the words of each rank when Arm looked last
  std::vector<uint32_t> closed_;  // `closed` of each rank at that time
  Arrivals arrivals_{this};
  Counter awaited_ = kAgreed;  // the counter of the last AllAt
  // The values when ArmForAll looked last. A value that has not changed since then does
  // not keep this rank awake: a peer may have added too much.
  uint64_t sum_seen_ = 0;
  uint32_t closed_seen_ = 0;

  // The bytes of the sums and of the words of all ranks.
  static size_t BytesOfWords(int size);

  friend size_t SharedSegmentBytes(int size, size_t tile_bytes);
};

// Returns the size in bytes of a shared segment for `size` ranks. Requires
// IsTileSize(tile_bytes): a positive multiple of 4096, at most 256 MiB.
size_t SharedSegmentBytes(int size, size_t tile_bytes);
bool IsTileSize(size_t tile_bytes);

}  // namespace ringjax
