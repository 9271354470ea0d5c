// See tile_order.h.
#include "engine/call/tile_order.h"

#include "base/failpoint.h"
#include "engine/call/loan_pace.h"
#include "transport/copy.h"

namespace ringjax {
namespace {

// Several sources are added up in pieces that stay in the first-level cache.
constexpr uint64_t kBlock = 8 << 10;
// Where sources are lent, each piece is a call of the kernel.
constexpr uint64_t kLentBlock = 32 << 10;

}  // namespace

Tiling CutIntoTiles(uint64_t count, uint64_t blocks, const Arithmetic& a,
                    const Board& board) {
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

Tiles::Tiles(const Memory& memory, const Tiling& tiling, const Arithmetic& a,
             const Lane& lane, Waiter* waiter, bool fetches, bool lends)
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
      loans_(memory, lane, lends),
      first_(board_.used() / slot_),
      base_(board_.mine(Board::kFetched)),
      known_(static_cast<size_t>(size_) * Board::kCounters, 0) {}

Status Tiles::Loop() {
  // All have just agreed, so who waits here for others waits for their work.
  if (lane_.pace) began_ = Clock::now();
  while (fetched_ < tiles_) {
    bool ready = false;
    if (summed_ < posted_) {
      RJ_TRY(Reached(Board::kPosted, summed_ + 1, &ready));
      if (ready) RJ_TRY(Freed(Board::kFetched, summed_, &ready));
      if (ready) {
        if (summed_ == 0) RJ_TRY(Begin());
        RJ_TRY(Sum(summed_++));
        board_.Publish(Board::kSummed, base_ + summed_);
        if (!fetches_) board_.Publish(Board::kFetched, base_ + ++fetched_);
      }
    }
    if (!ready && fetched_ < summed_) {
      RJ_TRY(Reached(Board::kSummed, fetched_ + 1, &ready));
      if (ready) {
        RJ_TRY(Fetch(fetched_++));
        board_.Publish(Board::kFetched, base_ + fetched_);
      }
    }
    if (!ready && posted_ < tiles_) {
      RJ_TRY(Freed(Board::kSummed, posted_, &ready));
      if (ready) {
        if (posted_ == 0) loans_.Show(Slot(0, rank_), slot_);
        if (!loans_.mine()) Post(posted_);
        board_.Publish(Board::kPosted, base_ + ++posted_);
      }
    }
    if (ready) {
      RJ_FAILPOINT(kMoving);
      waiter_->Progressed();
      continue;
    }
    RJ_TRY(waiter_->Idle(
        [this] { return std::vector<Waiter::Interest>{{&board_, true, false}}; }));
    RJ_TRY(
        CheckStall(lane_, *waiter_, [this] { return std::vector{late_}; }, kNotMoved));
  }
  board_.Use(tiles_ * slot_);
  return End();
}

Status Tiles::Begin() {
  for (int peer = 0; peer < size_; ++peer)
    if (peer != rank_) RJ_TRY(loans_.Learn(peer, Slot(0, peer), slot_));
  return OkStatus();
}

Status Tiles::End() {
  Time();
  const uint64_t all = base_ + tiles_;
  for (int peer = 0; peer < size_ && loans_.mine() && !lane_.ends_together; ++peer)
    if (peer != rank_)
      RJ_TRY(AwaitCounter(Board::kFetched, peer, all, base_, all, lane_, waiter_,
                          kNotMoved));
  loans_.End();
  return OkStatus();
}

void Tiles::Time() {
  const uint64_t bytes = memory_.in->bytes();
  if (!lane_.pace || bytes < LoanPace::kLeast) return;
  const std::chrono::duration<double> seconds = Clock::now() - began_;
  lane_.pace->Took(LoanPace::Kind(!fetches_, bytes), loans_.mine(), bytes,
                   seconds.count());
  board_.Set(Board::kWish, lane_.pace->wish());
}

void Tiles::Write(std::byte* to, Range range) const {
  const bool plain = IsPlain(a_, true);
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
}

uint64_t Tiles::Block() const {
  return (loans_.any() ? kLentBlock : kBlock) / std::max(width_, wire_);
}

bool Tiles::Add(std::byte* sum, const void* mine, uint64_t k, uint64_t offset,
                uint64_t at, uint64_t n) {
  for (int i = 1; i < size_; ++i) {
    // Ranks start with different peers, as in direct.cc.
    const int peer = (rank_ + i) % size_;
    const std::byte* const theirs =
        loans_.Lends(peer) ? Lent(peer, at, n) : Slot(k, peer) + offset;
    if (theirs == nullptr) return false;
    Combine(sum, mine, theirs, n, a_, i == 1, i == size_ - 1);
    mine = sum;
  }
  return true;
}

const std::byte* Tiles::Lent(int peer, uint64_t at, uint64_t n) {
  alignas(64) static thread_local std::byte block[kLentBlock];
  failure_ = loans_.Values(peer, at * width_, {{block, n * width_}});
  return failure_.ok() ? block : nullptr;
}

Status Tiles::Passed(Board::Counter counter, uint64_t value, bool* ready) {
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

uint64_t Tiles::Most(Board::Counter counter) const {
  if (counter == Board::kPosted) return board_.mine(Board::kSummed) + sets_;
  const bool sums = counter == Board::kSummed || !fetches_;
  return board_.mine(sums ? Board::kPosted : Board::kSummed);
}

}  // namespace ringjax
