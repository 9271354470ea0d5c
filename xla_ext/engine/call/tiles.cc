// Implements the tile pipeline, and on top of it the collectives. See tiles.h.
#include "engine/call/tiles.h"

#include <algorithm>

#include "base/failpoint.h"
#include "base/float_mode.h"
#include "transport/copy.h"
#include "transport/shared_segment.h"

namespace ringjax {
namespace {

// Reductions are strip-mined: all P contributions are added to one strip of this many
// bytes before the next strip is begun, so that the strip stays in the L1 cache.
constexpr uint64_t kStrip = 8 << 10;
// The results of a message of at least this many bytes are written to the output with
// non-temporal stores. An ordinary store would first load each line of the output, and
// results larger than a core's cache would evict the data of the next tile. Only output
// that is still in a cache from an earlier call, and read at once, is better written
// with ordinary stores, but a training step does not leave it there.
constexpr uint64_t kNonTemporalResult = 2 << 20;

// Memory for one strip in the wire's element type. Values are converted and scaled here
// before they go to the segment, so that the copier (AdaptiveCopier) can choose how to
// store them.
alignas(64) thread_local std::byte scratch[kStrip];

struct Range {
  uint64_t begin, end;  // elements of the message
};

// The layout of a message in the slots. All ranks compute it from the same arguments,
// so the layout is equal on all ranks.
struct Tiling {
  uint64_t tile = 0;   // elements of a tile that belong to one block (see Layout)
  uint64_t tiles = 0;  // tiles of the message
  uint64_t slot = 0;   // bytes of a slot: one tile of all blocks
  uint64_t slots = 0;  // slots in the area of a rank
};

// Lays out `blocks` blocks of `count` elements each. Every tile takes an equal share of
// each block, in whole cache lines. `tile` is 0 if that share would be less than one
// line, or if there are no elements.
//
// A message that fits one tile is not cut. Several tiles would let the phases overlap,
// but every further tile takes another exchange of counters between all cores.
Tiling Layout(uint64_t count, uint64_t blocks, const Arithmetic& arithmetic,
              const SharedSegment& segment) {
  const uint64_t wire_width = Width(arithmetic.wire);
  const uint64_t lines = (count * wire_width + kLineBytes - 1) / kLineBytes;
  const uint64_t most_lines = segment.tile_bytes() / blocks / kLineBytes;
  Tiling t;
  t.tile = std::min(most_lines, lines) * kLineBytes / wire_width;
  if (t.tile == 0) return t;
  t.tiles = (count + t.tile - 1) / t.tile;
  t.slot = t.tile * blocks * wire_width;
  t.slots = segment.area_bytes() / t.slot;
  return t;
}

// Runs the phases of all tiles in an order that never overwrites data in use. A derived
// class defines the phases of one tile.
//
// The flow control works as follows. Every rank publishes three counters: kCopiedIn,
// kReduced and kFinished. Each is the number of tiles, of all messages ever, that have
// passed the phase on that rank; kFinished counts after the last phase of a message.
// Counters are the only synchronization: there is no lock and no barrier. With S slots
// in an area, a rank may start a phase of tile k as soon as
//
//   copy in k    every peer has reduced tile k - S    (this rank's slot is free)
//   reduce k     every peer has copied in tile k      (the operands are there)
//                every peer has finished tile k - S   (the result slot is free)
//   copy out k   every peer has reduced tile k        (the results are there)
//
// Without a copy-out phase there is no result slot, and a rank counts the tiles of a
// message as finished when it has reduced all of them. A rank that contributes no data
// has nothing to copy in, and its peers do not wait for that.
//
// The first S tiles of a message are special. Slots of two messages may differ in size,
// so a slot of this message may overlap any slot of the previous message. The slots of
// these tiles are free once every peer has finished all previous messages.
//
// A rank runs one phase at a time: it tries to reduce first, then to copy out, then to
// copy in. Reducing is first, because all peers wait for the reduced part, and because
// its operands have just been written to the caches. Copying in is last, because it may
// run up to S tiles ahead anyway.
//
// Publish stores a counter with seq_cst, and Poll loads it with seq_cst. The release
// half of the store orders the writes and the reads of a phase before its counter
// (non-temporal stores are fenced where they are made, in transport/copy.cc). So a peer
// that acquires the counter may read the data, or may overwrite data that this rank has
// read. The total order of seq_cst is needed to wake a sleeping peer, as in
// transport/cma.cc.
class TilePipeline {
 public:
  TilePipeline(const Buffers& buffers, const Tiling& tiling,
               const Arithmetic& arithmetic, const Endpoints& endpoints, Waiter* waiter,
               bool copies_out)
      : buffers_(buffers),
        arithmetic_(arithmetic),
        endpoints_(endpoints),
        waiter_(waiter),
        segment_(*endpoints.segment),
        rank_(segment_.rank()),
        size_(segment_.size()),
        width_(Width(arithmetic.dtype)),
        wire_width_(Width(arithmetic.wire)),
        copies_out_(copies_out),
        tile_(tiling.tile),
        tiles_(tiling.tiles),
        slot_(tiling.slot),
        slots_(tiling.slots),
        first_slot_(segment_.cursor() / slot_),
        base_(segment_.own(SharedSegment::kFinished)),
        last_seen_(static_cast<size_t>(size_) * SharedSegment::kCounters, 0) {}
  TilePipeline(const TilePipeline&) = delete;
  TilePipeline& operator=(const TilePipeline&) = delete;
  virtual ~TilePipeline() = default;

  Status Run() {
    uint64_t copied_in = 0, reduced = 0, finished = 0;  // tiles of this message
    const bool contributes = Contributes(rank_);
    if (!contributes) copied_in = tiles_;
    all_contribute_ = true;
    for (int r = 0; r < size_; ++r) all_contribute_ &= Contributes(r);
    while (finished < tiles_) {
      bool ready = false;
      late_peer_ = -1;
      if (reduced < copied_in) {
        RJ_TRY(AllHave(SharedSegment::kCopiedIn, reduced + 1, &ready));
        if (ready && copies_out_)
          RJ_TRY(SlotIsFree(SharedSegment::kFinished, reduced, &ready));
        if (ready) {
          Reduce(reduced++);
          segment_.Publish(SharedSegment::kReduced, base_ + reduced);
          if (!copies_out_) finished = reduced;
        }
      }
      if (!ready && finished < reduced) {
        RJ_TRY(AllHave(SharedSegment::kReduced, finished + 1, &ready));
        if (ready) {
          CopyOut(finished++);
          segment_.Publish(SharedSegment::kFinished, base_ + finished);
        }
      }
      if (!ready && copied_in < tiles_) {
        RJ_TRY(SlotIsFree(SharedSegment::kReduced, copied_in, &ready));
        if (ready) {
          CopyIn(copied_in++);
          segment_.Publish(SharedSegment::kCopiedIn, base_ + copied_in);
        }
      }
      if (ready) {
        RJ_FAILPOINT(kMoving);
        waiter_->Progressed();
        continue;
      }
      RJ_TRY(waiter_->Idle([&] {
        return std::vector<Waiter::Interest>{
            {Wakes(copied_in, reduced, finished), true, false}};
      }));
      RJ_TRY(CheckStall(
          endpoints_, *waiter_, [this] { return std::vector{late_peer_}; }, kNotMoved));
    }
    // The three counters of a rank are equal between two messages.
    if (!contributes) segment_.Publish(SharedSegment::kCopiedIn, base_ + tiles_);
    if (!copies_out_) segment_.Publish(SharedSegment::kFinished, base_ + tiles_);
    // Only a finished message moves the cursor, because after an abort CopyOutRetained
    // must find the same slots again.
    segment_.AdvanceCursor(tiles_ * slot_);
    return OkStatus();
  }

 protected:
  // Returns whether `rank` copies data in. All ranks must return the same.
  virtual bool Contributes(int) const { return true; }
  virtual void CopyIn(uint64_t k) = 0;
  virtual void Reduce(uint64_t k) = 0;
  virtual void CopyOut(uint64_t) {}  // never called without copies_out

  // Returns the slot of tile `k` in the area of `rank`; rank == size_ stands for the
  // area of the common results.
  std::byte* Slot(uint64_t k, int rank) const {
    return segment_.Area(rank) + (first_slot_ + k) % slots_ * slot_;
  }

  // Writes this rank's values of `range` to a slot, converted to the wire's element
  // type and prescaled if the call has a prescale factor.
  void WriteInput(std::byte* to, Range range) const {
    const bool plain = IsPlain(arithmetic_, true);
    const uint64_t most = plain ? range.end - range.begin : StripElements();
    for (uint64_t at = range.begin; at < range.end;) {
      const Span from =
          buffers_.in->At(at * width_, std::min(most, range.end - at) * width_);
      const uint64_t n = from.bytes / width_;
      if (!plain) Encode(scratch, from.data, n, arithmetic_, true);
      segment_.copier().Copy(to, plain ? from.data : scratch, n * wire_width_);
      to += n * wire_width_;
      at += n;
    }
  }

  uint64_t StripElements() const { return kStrip / std::max(width_, wire_width_); }

  // Reduces `own` and the `n` elements at byte `offset` of every peer's slot of tile
  // `k` into `result`, which `sums` describes.
  //
  // Each rank starts with the data of the next rank, so that not all ranks read from
  // one core at the same time. The order of the sum differs between parts, but only one
  // rank sums each part, so all ranks have the same result.
  void ReduceStrip(std::byte* result, const void* own, uint64_t k, uint64_t offset,
                   uint64_t n, Sums sums = Sums::kComplete) const {
    for (int i = 1; i < size_; ++i) {
      const int peer = (rank_ + i) % size_;
      Combine(result, own, Slot(k, peer) + offset, n, arithmetic_, i == 1,
              i == size_ - 1 && sums == Sums::kComplete);
      own = result;
    }
  }

  const Buffers& buffers_;
  const Arithmetic& arithmetic_;
  const Endpoints& endpoints_;
  Waiter* waiter_;
  SharedSegment& segment_;
  const int rank_, size_;
  const uint64_t width_, wire_width_;           // bytes of an element
  const bool copies_out_;                       // whether the message has a third phase
  const uint64_t tile_, tiles_, slot_, slots_;  // see Tiling

 private:
  // Sets `*ready` to whether `counter` of every peer has counted `tiles` tiles of this
  // message.
  Status AllHave(SharedSegment::Counter counter, uint64_t tiles, bool* ready) {
    return AllReached(counter, base_ + tiles, ready);
  }

  // Sets `*ready` to whether all peers are done with the previous tile of the slot of
  // tile `k`, so that the slot may be overwritten. `counter` counts the phase in which
  // peers read the slot.
  Status SlotIsFree(SharedSegment::Counter counter, uint64_t k, bool* ready) {
    if (k < slots_) return AllReached(SharedSegment::kFinished, base_, ready);
    return AllReached(counter, base_ + k + 1 - slots_, ready);
  }

  Status AllReached(SharedSegment::Counter counter, uint64_t value, bool* ready) {
    *ready = false;
    for (int r = 0; r < size_; ++r) {
      if (r == rank_ || LastSeen(counter, r) >= value) continue;
      if (counter == SharedSegment::kCopiedIn && !Contributes(r)) continue;
      RJ_TRY(
          segment_.Poll(counter, r, value, UpperBound(counter), &LastSeen(counter, r)));
      if (LastSeen(counter, r) >= value) continue;
      // A pass of Run first checks the phase of the oldest tile. A peer that is late
      // for that phase is the culprit. A peer that is late for another phase may itself
      // be waiting.
      if (late_peer_ < 0) late_peer_ = r;
      return OkStatus();
    }
    *ready = true;
    return OkStatus();
  }

  // Returns what wakes this rank. If only one phase is left, a rank that waits for all
  // ranks is woken once, and not each time that a rank has copied in or reduced a tile.
  Waitable* Wakes(uint64_t copied_in, uint64_t reduced, uint64_t finished) const {
    if (tiles_ > slots_) return &segment_;
    if (copied_in == tiles_ && reduced == finished && all_contribute_)
      return segment_.AllAt(SharedSegment::kCopiedIn, base_ + reduced + 1);
    if (reduced == tiles_)
      return segment_.AllAt(SharedSegment::kReduced, base_ + finished + 1);
    return &segment_;
  }

  uint64_t& LastSeen(SharedSegment::Counter counter, int rank) {
    return last_seen_[static_cast<size_t>(rank) * SharedSegment::kCounters + counter];
  }

  // Returns the largest value that the counter of a correct peer can have, given this
  // rank's own counters: this follows from the rules of the flow control (see
  // TilePipeline). A greater value means that the shared segment is damaged.
  uint64_t UpperBound(SharedSegment::Counter counter) const {
    if (counter == SharedSegment::kCopiedIn)
      return segment_.own(SharedSegment::kReduced) + slots_;
    const bool reduces = counter == SharedSegment::kReduced || !copies_out_;
    return segment_.own(reduces ? SharedSegment::kCopiedIn : SharedSegment::kReduced);
  }

  const uint64_t first_slot_;        // tile k has slot (first_slot_ + k) % slots_
  const uint64_t base_;              // tiles of all messages before this one
  bool all_contribute_ = true;       // Contributes of all ranks
  std::vector<uint64_t> last_seen_;  // counters of the peers, by rank and counter
  int late_peer_ = -1;               // the peer that the oldest phase waits for
};

// The parts of a tile are consecutive ranges, one for each rank in rank order. A rank's
// slot has the layout of the tile. The part that the rank owns is unused.
class AllreducePipeline : public TilePipeline {
 public:
  AllreducePipeline(const Buffers& buffers, uint64_t count,
                    const Arithmetic& arithmetic, const Endpoints& endpoints,
                    Waiter* waiter)
      : TilePipeline(buffers, Layout(count, 1, arithmetic, *endpoints.segment),
                     arithmetic, endpoints, waiter, true),
        count_(count) {}

  void CopyOutAll() {
    for (uint64_t k = 0; k < tiles_; ++k) CopyOut(k);
  }

 protected:
  Range Tile(uint64_t k) const {
    return {k * tile_, std::min(count_, (k + 1) * tile_)};
  }

  // Returns the part of `tile` that `rank` owns. Parts are whole cache lines, so that
  // no two ranks write to one line of the result slot. The parts of the last ranks may
  // be short or empty.
  Range Part(Range tile, int rank) const {
    const uint64_t line = kLineBytes / wire_width_;
    const auto ranks = static_cast<uint64_t>(size_), r = static_cast<uint64_t>(rank);
    const uint64_t lines = (tile.end - tile.begin + line - 1) / line;
    const uint64_t each = (lines + ranks - 1) / ranks * line;
    return {std::min(tile.end, tile.begin + r * each),
            std::min(tile.end, tile.begin + (r + 1) * each)};
  }

 private:
  // Calls visit(range) for the elements of the tile that other ranks own: the range
  // before the part of this rank and the range after that part, unless empty.
  template <typename Visit>
  void ForPeersParts(Range tile, Visit visit) const {
    const Range own = Part(tile, rank_);
    if (tile.begin < own.begin) visit(Range{tile.begin, own.begin});
    if (own.end < tile.end) visit(Range{own.end, tile.end});
  }

  // Returns whether non-temporal stores write a result to the output. Returns false if
  // the output is the input: this rank has just read it, so ordinary stores find its
  // lines in a cache.
  bool IsNonTemporal(const Span& out, const Span& in) const {
    return count_ * width_ >= kNonTemporalResult && out.data != in.data &&
           !arithmetic_.compressed();
  }

  void CopyIn(uint64_t k) override {
    const Range tile = Tile(k);
    std::byte* slot = Slot(k, rank_);
    ForPeersParts(tile, [&](Range range) {
      WriteInput(slot + (range.begin - tile.begin) * wire_width_, range);
    });
  }

  void Reduce(uint64_t k) override {
    const FloatMode mode;  // set once for all strips
    const Range tile = Tile(k), part = Part(tile, rank_);
    for (uint64_t at = part.begin; at < part.end;) {
      const uint64_t most = std::min(StripElements(), part.end - at) * width_;
      const Span out = buffers_.out->At(at * width_, most);
      const Span own = buffers_.in->At(at * width_, out.bytes);
      const uint64_t n = own.bytes / width_, offset = (at - tile.begin) * wire_width_;
      ReduceToOutputAndSlot(out.data, own.data, k, offset, n, IsNonTemporal(out, own));
      at += n;
    }
  }

  // Reduces one strip and writes the result twice: to the output, and in the wire's
  // element type to the common result slot. Non-temporal stores write the output if
  // `non_temporal` is set, and the slot if the copier uses such stores at the moment,
  // because the cores share no cache (`far`). These stores evict the lines from the
  // caches, but a reduction reads its partial sums back. So a strip is never reduced in
  // memory that non-temporal stores write, but in the output, the slot or scratch, and
  // is then copied.
  void ReduceToOutputAndSlot(std::byte* out, const void* own, uint64_t k,
                             uint64_t offset, uint64_t n, bool non_temporal) {
    const bool far = segment_.copier().non_temporal();
    std::byte* const slot = Slot(k, size_) + offset;
    std::byte* result = far ? scratch : slot;  // the result in the wire's element type
    ReduceStrip(non_temporal ? result : out, own, k, offset, n);
    if (non_temporal)
      CopyNonTemporal(out, result, n * width_);  // uncompressed, so types are equal
    else if (arithmetic_.compressed())
      Encode(result, out, n, arithmetic_, false);
    else
      result = out;
    if (far)
      CopyNonTemporal(slot, result, n * wire_width_);
    else if (result != slot)
      CopyBytes(slot, result, n * wire_width_);
  }

  void CopyOut(uint64_t k) override {
    const Range tile = Tile(k);
    const std::byte* results = Slot(k, size_);
    ForPeersParts(tile, [&](Range range) {
      const std::byte* from = results + (range.begin - tile.begin) * wire_width_;
      for (uint64_t at = range.begin; at < range.end;) {
        const Span to = buffers_.out->At(at * width_, (range.end - at) * width_);
        const uint64_t n = to.bytes / width_;
        if (arithmetic_.compressed())
          Decode(to.data, from, n, arithmetic_);
        else if (IsNonTemporal(to, buffers_.in->At(at * width_, to.bytes)))
          CopyNonTemporal(to.data, from, to.bytes);
        else
          CopyBytes(to.data, from, to.bytes);
        from += n * wire_width_;
        at += n;
      }
    });
  }

  const uint64_t count_;
};

// An allreduce of 8-byte sums, with float results. The results of a part begin in the
// result slot where its sums would, so that no two ranks write to one line.
class ExchangePipeline : public AllreducePipeline {
 public:
  ExchangePipeline(const Buffers& buffers, uint64_t count, const Arithmetic& arithmetic,
                   SumDecoder* decoder, const Endpoints& endpoints, Waiter* waiter)
      : AllreducePipeline(buffers, count, arithmetic, endpoints, waiter),
        decoder_(decoder) {}

  std::vector<PartOfSums> PartsOf(int rank) const {
    std::vector<PartOfSums> parts;
    for (uint64_t k = 0; k < tiles_; ++k) {
      const Range part = Part(Tile(k), rank);
      if (part.begin < part.end) parts.push_back({part.begin, part.end});
    }
    return parts;
  }

 private:
  // Elements that are decoded, or copied out, at a time: their means stay in the L1
  // cache. The sums need not, because one pass adds, checks and decodes them. Each
  // strip ends with a fence of the non-temporal stores, so short strips take longer.
  static constexpr uint64_t kMost = 4096;

  void Reduce(uint64_t k) override {
    alignas(64) float decoded[kMost];
    const bool far = segment_.copier().non_temporal();  // see ReduceToOutputAndSlot
    const FloatMode mode;
    const Range tile = Tile(k), part = Part(tile, rank_);
    for (uint64_t at = part.begin; at < part.end;) {
      const uint64_t most = std::min(kMost, part.end - at);
      const Span own = buffers_.in->At(at * width_, most * width_);
      const uint64_t n = own.bytes / width_, offset = (at - tile.begin) * width_;
      auto* const result = reinterpret_cast<float*>(Result(k, part, at));
      float* const means = far ? decoded : result;
      decoder_->Decode(SumsOfOthers(own.data, k, offset, n), LastTerms(k, offset), n,
                       at, means);
      Store(means, at, n);
      if (far) CopyNonTemporal(result, means, n * sizeof(float));
      at += n;
    }
  }

  // Adds the terms of all peers but the last one to `own`, and returns the sums. The
  // decoder adds those of the last one.
  const int64_t* SumsOfOthers(const void* own, uint64_t k, uint64_t offset,
                              uint64_t n) const {
    alignas(64) static thread_local int64_t sums[kMost];
    for (int i = 1; i < size_ - 1; ++i) {
      Combine(sums, own, Slot(k, (rank_ + i) % size_) + offset, n, arithmetic_, false,
              false);
      own = sums;
    }
    return static_cast<const int64_t*>(own);
  }

  const int64_t* LastTerms(uint64_t k, uint64_t offset) const {
    const int last = (rank_ + size_ - 1) % size_;
    return reinterpret_cast<const int64_t*>(Slot(k, last) + offset);
  }

  void CopyOut(uint64_t k) override {
    for (int i = 1; i < size_; ++i) {
      const int owner = (rank_ + i) % size_;
      const Range part = Part(Tile(k), owner);
      for (uint64_t at = part.begin; at < part.end; at += kMost) {
        const uint64_t n = std::min(kMost, part.end - at);
        auto* const means = reinterpret_cast<const float*>(Result(k, part, at));
        Store(decoder_->Receive(owner, means, n, at), at, n);
      }
    }
  }

  std::byte* Result(uint64_t k, Range part, uint64_t at) const {
    return Slot(k, size_) + (part.begin - Tile(k).begin) * width_ +
           (at - part.begin) * sizeof(float);
  }

  void Store(const float* means, uint64_t at, uint64_t n) const {
    const bool past_caches = buffers_.out->bytes() >= kNonTemporalResult;
    const auto* from = reinterpret_cast<const std::byte*>(means);
    buffers_.out->ForPieces(at * sizeof(float), n * sizeof(float), [&](Span to) {
      (past_caches ? CopyNonTemporal : CopyBytes)(to.data, from, to.bytes);
      from += to.bytes;
    });
  }

  SumDecoder* const decoder_;
};

// A message of blocks, one for each rank: counts[r] elements that belong to rank r.
class BlockPipeline : public TilePipeline {
 public:
  BlockPipeline(const Buffers& buffers, std::vector<uint64_t> counts,
                const Tiling& tiling, const Arithmetic& arithmetic,
                const Endpoints& endpoints, Waiter* waiter)
      : TilePipeline(buffers, tiling, arithmetic, endpoints, waiter, false),
        counts_(std::move(counts)) {
    for (const uint64_t count : counts_) starts_.push_back(starts_.back() + count);
  }

 protected:
  // Returns the elements of the block of `rank` in tile `k`, numbered from the start of
  // that block.
  Range Part(uint64_t k, int rank) const {
    const uint64_t count = counts_[static_cast<size_t>(rank)];
    return {std::min(count, k * tile_), std::min(count, (k + 1) * tile_)};
  }
  // Returns the number of elements in the blocks before that of `rank`.
  uint64_t Start(int rank) const { return starts_[static_cast<size_t>(rank)]; }
  uint64_t Count(int rank) const { return counts_[static_cast<size_t>(rank)]; }

  // Copies the blocks for the peers into the slot of this rank. The slot has a place of
  // `tile_` elements for each rank. The place of this rank is unused, and so is the end
  // of a place whose rank receives fewer elements than other ranks.
  void CopyInForPeers(uint64_t k) const {
    for (int r = 0; r < size_; ++r) {
      if (r == rank_) continue;
      const Range part = Part(k, r);
      WriteInput(PlaceFor(r, k, rank_), {Start(r) + part.begin, Start(r) + part.end});
    }
  }
  // Returns the place for the data to `reader` in the slot of `writer`.
  std::byte* PlaceFor(int reader, uint64_t k, int writer) const {
    return Slot(k, writer) + static_cast<uint64_t>(reader) * tile_ * wire_width_;
  }

 private:
  const std::vector<uint64_t> counts_;
  std::vector<uint64_t> starts_ = {0};
};

class ReducescatterPipeline : public BlockPipeline {
 public:
  ReducescatterPipeline(const Buffers& buffers, std::vector<uint64_t> counts, Sums sums,
                        const Tiling& tiling, const Arithmetic& arithmetic,
                        const Endpoints& endpoints, Waiter* waiter)
      : BlockPipeline(buffers, std::move(counts), tiling, arithmetic, endpoints,
                      waiter),
        sums_(sums) {}

 private:
  void CopyIn(uint64_t k) override { CopyInForPeers(k); }

  void Reduce(uint64_t k) override {
    const FloatMode mode;  // see AllreducePipeline::Reduce
    const Range part = Part(k, rank_);
    const uint64_t place = PlaceFor(rank_, k, 0) - Slot(k, 0);
    for (uint64_t at = part.begin; at < part.end;) {
      const uint64_t most = std::min(StripElements(), part.end - at) * width_;
      const Span out = buffers_.out->At(at * width_, most);
      const Span own = buffers_.in->At((Start(rank_) + at) * width_, out.bytes);
      const uint64_t n = own.bytes / width_;
      ReduceStrip(out.data, own.data, k, place + (at - part.begin) * wire_width_, n,
                  sums_);
      at += n;
    }
  }

  const Sums sums_;
};

// A collective that only moves bytes. In an alltoall, all blocks have the same size,
// and a slot has a place for each reader. Otherwise, every rank that contributes has
// one block, which all ranks read, and a slot holds nothing else.
class MovePipeline : public BlockPipeline {
 public:
  MovePipeline(const Buffers& buffers, bool alltoall, std::vector<uint64_t> counts,
               const Tiling& tiling, const Arithmetic& arithmetic,
               const Endpoints& endpoints, Waiter* waiter)
      : BlockPipeline(buffers, std::move(counts), tiling, arithmetic, endpoints,
                      waiter),
        alltoall_(alltoall) {}

 private:
  bool Contributes(int rank) const override { return Count(rank) > 0; }

  void CopyIn(uint64_t k) override {
    if (alltoall_) return CopyInForPeers(k);
    WriteInput(Slot(k, rank_), Part(k, rank_));
  }

  // Copies the parts of all ranks to the output. Each rank starts with its own part and
  // then reads that of the next rank, so that not all ranks read from one core.
  void Reduce(uint64_t k) override {
    for (int i = 0; i < size_; ++i) {
      const int from = (rank_ + i) % size_;
      const Range part = Part(k, from);
      const uint64_t out = Start(from) + part.begin, bytes = part.end - part.begin;
      if (from != rank_) {
        Store(alltoall_ ? PlaceFor(rank_, k, from) : Slot(k, from), out, bytes);
        continue;
      }
      uint64_t at = out;
      buffers_.in->ForPieces(alltoall_ ? out : part.begin, bytes, [&](Span piece) {
        Store(piece.data, at, piece.bytes);
        at += piece.bytes;
      });
    }
  }

  // Copies `bytes` bytes to the output, from its byte `at` on.
  void Store(const std::byte* from, uint64_t at, uint64_t bytes) const {
    const bool past_caches = buffers_.out->bytes() >= kNonTemporalResult;
    buffers_.out->ForPieces(at, bytes, [&](Span to) {
      if (to.data == from) return;  // a broadcast in place, on the root
      (past_caches ? CopyNonTemporal : CopyBytes)(to.data, from, to.bytes);
      from += to.bytes;
    });
  }

  const bool alltoall_;
};

// Returns the size of each rank's block, which the rank receives in a reduce-scatter,
// and contributes otherwise.
std::vector<uint64_t> BlockSizes(const Problem& problem, int size) {
  const auto ranks = static_cast<size_t>(size);
  std::vector<uint64_t> counts = problem.counts;
  if (problem.op == Collective::kAlltoall) counts.resize(ranks);
  if (problem.op != Collective::kBroadcast) return counts;
  counts.assign(ranks, 0);
  counts[static_cast<size_t>(problem.root)] = problem.counts[0];
  return counts;
}

}  // namespace

Status RunInTiles(const Problem& problem, const Buffers& buffers,
                  const Arithmetic& arithmetic, const Endpoints& endpoints,
                  Waiter* waiter, bool* fits, Sums sums) {
  *fits = true;
  if (problem.op == Collective::kAllreduce)
    return AllreducePipeline(buffers, problem.counts[0], arithmetic, endpoints, waiter)
        .Run();
  const int size = endpoints.segment->size();
  const bool alltoall = problem.op == Collective::kAlltoall;
  const bool reduces = problem.op == Collective::kReducescatter;
  std::vector<uint64_t> counts = BlockSizes(problem, size);
  const uint64_t longest = *std::max_element(counts.begin(), counts.end());
  const uint64_t places = alltoall || reduces ? counts.size() : 1;
  const Tiling tiling = Layout(longest, places, arithmetic, *endpoints.segment);
  *fits = longest == 0 || tiling.tile > 0;
  if (tiling.tiles == 0) return OkStatus();
  if (reduces)
    return ReducescatterPipeline(buffers, std::move(counts), sums, tiling, arithmetic,
                                 endpoints, waiter)
        .Run();
  return MovePipeline(buffers, alltoall, std::move(counts), tiling, arithmetic,
                      endpoints, waiter)
      .Run();
}

Status ExchangeInTiles(uint64_t count, const Buffers& buffers,
                       const Arithmetic& arithmetic, SumDecoder* decoder,
                       const Endpoints& endpoints, Waiter* waiter) {
  ExchangePipeline pipeline(buffers, count, arithmetic, decoder, endpoints, waiter);
  uint64_t sums = 0;
  for (const PartOfSums& part : pipeline.PartsOf(endpoints.segment->rank()))
    sums += part.end - part.begin;
  decoder->Expect(sums, count - sums);
  return pipeline.Run();
}

std::vector<PartOfSums> PartsInTiles(uint64_t count, const Arithmetic& arithmetic,
                                     const Endpoints& endpoints, int rank) {
  return ExchangePipeline({}, count, arithmetic, nullptr, endpoints, nullptr)
      .PartsOf(rank);
}

uint64_t RetainedWhenReducedIs(uint64_t count, const Arithmetic& arithmetic,
                               const SharedSegment& segment) {
  const Tiling tiling = Layout(count, 1, arithmetic, segment);
  if (tiling.tiles > tiling.slots) return 0;
  // Between messages the three counters are equal, so any counter can serve as the
  // base.
  return segment.own(SharedSegment::kFinished) + tiling.tiles;
}

void CopyOutRetained(const Buffers& buffers, uint64_t count,
                     const Arithmetic& arithmetic, const Endpoints& endpoints) {
  AllreducePipeline(buffers, count, arithmetic, endpoints, nullptr).CopyOutAll();
}

}  // namespace ringjax
