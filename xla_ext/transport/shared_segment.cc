// Implements the memory layout and the counters of a shared segment.
#include "transport/shared_segment.h"

#include <algorithm>

namespace ringjax {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kMaxTile = size_t{1} << 28;

constexpr size_t RoundUp(size_t bytes, size_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

// Bytes between neighbouring slots and areas, so that their starts do not map to the
// same set of a cache.
constexpr size_t kStagger = 2 * kLineBytes;
// A call of 64 KiB with its header fits an inline slot, unless there are so many ranks
// that all slots together would take too much memory.
constexpr size_t kMaxInline = 65 << 10, kMinInline = 16 << 10;
// The limit in bytes for the slots of all ranks in one call.
constexpr size_t kMaxInlineOfAll = 1 << 20;
constexpr size_t InlineBytes(int size) {
  const size_t share = kMaxInlineOfAll / static_cast<size_t>(size) / kPage * kPage;
  return std::clamp(share, kMinInline, kMaxInline);
}
constexpr size_t InlineStride(size_t bytes) {
  return bytes + kStagger;  // the stagger has room for the header
}
constexpr size_t TurnBytes(int size) {  // the slots of all ranks
  return static_cast<size_t>(size) * InlineStride(InlineBytes(size));
}
// Bytes of all sets of inline slots. Successive turns use successive sets, and two sets
// would be enough. Sets that together are longer than a core's own cache are faster,
// for the reason given at SharedSegment::cursor.
constexpr size_t kInlineTotal = 4 << 20;
constexpr uint64_t InlineSets(int size) {
  return std::max<uint64_t>(kInlineTotal / TurnBytes(size), 2);
}
constexpr size_t AreaStride(size_t tile_bytes) {
  return SharedSegment::kTiles * tile_bytes + kPage + kStagger;
}

size_t BytesOfInlineSlots(int size) {
  return RoundUp(InlineSets(size) * TurnBytes(size), kPage);
}

}  // namespace

bool IsTileSize(size_t tile_bytes) {
  return tile_bytes > 0 && tile_bytes <= kMaxTile && tile_bytes % kPage == 0;
}

size_t SharedSegment::BytesOfWords(int size) {
  return RoundUp(sizeof(Sums) + static_cast<size_t>(size) * sizeof(Words), kPage);
}

size_t SharedSegmentBytes(int size, size_t tile_bytes) {
  const auto ranks = static_cast<size_t>(size);
  return RoundUp(SharedSegment::BytesOfWords(size) + BytesOfInlineSlots(size) +
                     (ranks + 1) * AreaStride(tile_bytes),
                 kPage);
}

SharedSegment::SharedSegment(Doorbell* doorbell)
    : doorbell_(doorbell),
      sums_(reinterpret_cast<Sums*>(doorbell->memory()->segment())),
      words_(reinterpret_cast<Words*>(sums_ + 1)),
      inline_slots_(doorbell->memory()->segment() +
                    BytesOfWords(doorbell->memory()->layout().ranks)),
      areas_(inline_slots_ + BytesOfInlineSlots(doorbell->memory()->layout().ranks)),
      rank_(doorbell->index()),
      size_(doorbell->memory()->layout().ranks),
      inline_bytes_(InlineBytes(size_)),
      inline_sets_(InlineSets(size_)),
      tile_bytes_(doorbell->memory()->layout().tile_bytes),
      seen_(static_cast<size_t>(size_)),
      closed_(static_cast<size_t>(size_)) {}

SharedSegment::~SharedSegment() {
  // A peer that sees the sum, but not that this rank has closed, sleeps until Close
  // rings.
  std::atomic_ref<uint32_t>(sums_->closed).fetch_add(1, std::memory_order_seq_cst);
  doorbell_->Close();
}

std::byte* SharedSegment::InlineSlot(uint64_t turn, int rank) const {
  const uint64_t set = turn % inline_sets_;
  return inline_slots_ +
         (set * static_cast<size_t>(size_) + static_cast<size_t>(rank)) *
             InlineStride(inline_bytes_);
}

std::byte* SharedSegment::Area(int rank) const {
  return areas_ + static_cast<size_t>(rank) * AreaStride(tile_bytes_);
}

void SharedSegment::Publish(Counter counter, uint64_t value) {
  const uint64_t step = value - own_[counter];
  own_[counter] = value;
  StoreShared(words_[rank_].counters[counter], value);
  const std::atomic_ref<uint64_t> sum(sums_->counters[counter]);
  const uint64_t now = sum.fetch_add(step, std::memory_order_seq_cst) + step;
  // The additions and the loads are seq_cst and pair with Arm: either the load of
  // `asleep` sees that the peer sleeps, or the peer's Arm sees the counter or the sum.
  for (int r = 0; r < size_; ++r) {
    Words& words = words_[r];
    const uint32_t asleep = r == rank_ ? kAwake : LoadShared(words.asleep);
    if (asleep == kAwake) continue;
    if (asleep != kAny && (asleep != kAll + static_cast<uint32_t>(counter) ||
                           now < LoadShared(words.sum)))
      continue;
    const std::atomic_ref<uint32_t> word(words.asleep);
    if (word.exchange(kAwake, std::memory_order_seq_cst) != kAwake)
      doorbell_->RingPeer(r);
  }
}

uint64_t SharedSegment::Look(Counter counter, int rank) const {
  return LoadShared(words_[rank].counters[counter]);
}

Status SharedSegment::Poll(Counter counter, int rank, uint64_t value, uint64_t most,
                           uint64_t* known) const {
  // If `closed` is set, the counter that is loaded next is final.
  const bool closed = LoadShared(doorbell_->words(rank).closed) != 0;
  const uint64_t now = Look(counter, rank);
  if (now < *known || now > most)
    return Status(Code::kUnavailable, "shared memory is damaged: impossible position",
                  rank);
  *known = now;
  if (now < value && closed)
    return Status(Code::kUnavailable, "has closed the link", rank);
  return OkStatus();
}

void SharedSegment::Stop() { StoreShared(words_[rank_].stopped, uint32_t{1}); }

int SharedSegment::Stopped() const {
  for (int r = 0; r < size_; ++r)
    if (r != rank_ && LoadShared(words_[r].stopped) != 0) return r;
  return -1;
}

void SharedSegment::Leave(uint64_t finished) {
  StoreShared(words_[rank_].left, finished + 1);
}

std::optional<uint64_t> SharedSegment::FinishedOf(int rank) const {
  const uint64_t left = LoadShared(words_[rank].left);
  if (left == 0) return std::nullopt;
  return left - 1;
}

bool SharedSegment::Arm(bool, bool, std::vector<pollfd>*) {
  StoreShared(words_[rank_].asleep, uint32_t{kAny});
  bool advanced = false;
  auto see = [&advanced](auto& word, auto& seen) {
    const auto now = LoadShared(word);
    advanced |= now != seen;
    seen = now;
  };
  for (int r = 0; r < size_; ++r) {
    if (r == rank_) continue;
    Words& seen = seen_[static_cast<size_t>(r)];
    see(doorbell_->words(r).closed, closed_[static_cast<size_t>(r)]);
    for (size_t c = 0; c < kCounters; ++c) see(words_[r].counters[c], seen.counters[c]);
  }
  return advanced;
}

void SharedSegment::Disarm() { StoreShared(words_[rank_].asleep, uint32_t{kAwake}); }

Waitable* SharedSegment::AllAt(Counter counter, uint64_t value) {
  const uint64_t wanted = static_cast<uint64_t>(size_) * value;
  if (awaited_ == counter && words_[rank_].sum == wanted) return &arrivals_;
  awaited_ = counter;
  sum_seen_ = 0;
  StoreShared(words_[rank_].sum, wanted);
  return &arrivals_;
}

bool SharedSegment::ArmForAll() {
  const uint64_t wanted = words_[rank_].sum;
  StoreShared(words_[rank_].asleep, uint32_t{kAll} + static_cast<uint32_t>(awaited_));
  const uint64_t sum = LoadShared(sums_->counters[awaited_]);
  const uint32_t closed = LoadShared(sums_->closed);
  const bool changed = sum != sum_seen_, fewer = closed != closed_seen_;
  sum_seen_ = sum;
  closed_seen_ = closed;
  return (changed && sum >= wanted) || fewer;
}

}  // namespace ringjax
