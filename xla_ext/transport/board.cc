// The layout of a board and its counters; boards of threads. See board.h.
#include "transport/board.h"

#include <algorithm>

#include "transport/local_memory.h"

namespace ringjax {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kMaxTile = size_t{1} << 28;

constexpr size_t RoundUp(size_t bytes, size_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

// Neighbours must not start at the same place of a cache.
constexpr size_t kStagger = 2 * kLineBytes;
// A call of 64 KiB, and what is said about it, fits a note, where that many ranks'
// notes are not too much memory.
constexpr size_t kMostNote = 65 << 10, kLeastNote = 16 << 10;
constexpr size_t kMostNotes = 1 << 20;  // of all ranks in a turn
constexpr size_t NoteBytes(int size) {
  const size_t share = kMostNotes / static_cast<size_t>(size) / kPage * kPage;
  return std::clamp(share, kLeastNote, kMostNote);
}
constexpr size_t NoteStride(size_t note) {
  return note + kStagger;  // which has room for the header
}
constexpr size_t TurnBytes(int size) {  // the notes of all ranks
  return static_cast<size_t>(size) * NoteStride(NoteBytes(size));
}
// Turns need two sets. More of them, together longer than a core's own cache, are
// quicker: see Board::used.
constexpr size_t kNotes = 4 << 20;
constexpr uint64_t NoteSets(int size) {
  return std::max<uint64_t>(kNotes / TurnBytes(size), 2);
}
constexpr size_t AreaStride(size_t tile_bytes) {
  return Board::kTiles * tile_bytes + kPage + kStagger;
}

size_t BytesOfNotes(int size) {
  return RoundUp(NoteSets(size) * TurnBytes(size), kPage);
}

}  // namespace

bool IsTileSize(size_t tile_bytes) {
  return tile_bytes > 0 && tile_bytes <= kMaxTile && tile_bytes % kPage == 0;
}

size_t BoardBytes(int size, size_t tile_bytes) {
  const auto ranks = static_cast<size_t>(size);
  return RoundUp(RoundUp(ranks * sizeof(Board::Words), kPage) + BytesOfNotes(size) +
                     (ranks + 1) * AreaStride(tile_bytes),
                 kPage);
}

Board::Board(std::byte* block, int rank, int size, size_t tile_bytes)
    : words_(reinterpret_cast<Words*>(block)),
      notes_(block + RoundUp(static_cast<size_t>(size) * sizeof(Words), kPage)),
      areas_(notes_ + BytesOfNotes(size)),
      rank_(rank),
      size_(size),
      note_bytes_(NoteBytes(size)),
      note_sets_(NoteSets(size)),
      tile_bytes_(tile_bytes),
      seen_(static_cast<size_t>(size)) {}

std::byte* Board::Note(uint64_t turn, int rank) const {
  const uint64_t set = turn % note_sets_;
  return notes_ + (set * static_cast<size_t>(size_) + static_cast<size_t>(rank)) *
                      NoteStride(note_bytes_);
}

std::byte* Board::Area(int rank) const {
  return areas_ + static_cast<size_t>(rank) * AreaStride(tile_bytes_);
}

void Board::Publish(Counter counter, uint64_t value) {
  mine_[counter] = value;
  StoreShared(words_[rank_].counters[counter], value);
  for (int r = 0; r < size_; ++r) {
    if (r == rank_ || LoadShared(words_[r].asleep) == 0) continue;
    const std::atomic_ref<uint32_t> asleep(words_[r].asleep);
    if (asleep.exchange(0, std::memory_order_seq_cst) != 0) RingPeer(r);
  }
}

uint64_t Board::Look(Counter counter, int rank) const {
  return LoadShared(words_[rank].counters[counter]);
}

Status Board::Follow(Counter counter, int rank, uint64_t value, uint64_t most,
                     uint64_t* known) const {
  const bool closed = LoadShared(words_[rank].closed) != 0;  // before the counter
  const uint64_t now = Look(counter, rank);
  if (now < *known || now > most)
    return Status(Code::kUnavailable, "shared memory is damaged: impossible position",
                  rank);
  *known = now;
  if (now < value && closed)
    return Status(Code::kUnavailable, "the peer closed the link", rank);
  return OkStatus();
}

void Board::Stop() { StoreShared(words_[rank_].stopped, uint32_t{1}); }

int Board::Stopped() const {
  for (int r = 0; r < size_; ++r)
    if (r != rank_ && LoadShared(words_[r].stopped) != 0) return r;
  return -1;
}

bool Board::Arm(bool, bool, std::vector<pollfd>*) {
  StoreShared(words_[rank_].asleep, uint32_t{1});
  bool news = false;
  auto see = [&news](auto& word, auto& seen) {
    const auto now = LoadShared(word);
    news |= now != seen;
    seen = now;
  };
  for (int r = 0; r < size_; ++r) {
    if (r == rank_) continue;
    Words& seen = seen_[static_cast<size_t>(r)];
    see(words_[r].closed, seen.closed);
    for (size_t c = 0; c < kCounters; ++c) see(words_[r].counters[c], seen.counters[c]);
  }
  return news;
}

void Board::Disarm() { StoreShared(words_[rank_].asleep, uint32_t{0}); }

void Board::Close() {
  StoreShared(words_[rank_].closed, uint32_t{1});
  for (int r = 0; r < size_; ++r)
    if (r != rank_) RingPeer(r);
}

namespace {

class LocalBoard final : public Board {
 public:
  LocalBoard(std::shared_ptr<LocalMemory> memory, int rank, int size, size_t tile_bytes)
      : Board(memory->block(), rank, size, tile_bytes), memory_(std::move(memory)) {}
  ~LocalBoard() override {
    Close();
    memory_->Forget(rank());
  }

 private:
  void RingPeer(int rank) override { memory_->Ring(rank); }

  std::shared_ptr<LocalMemory> memory_;
};

}  // namespace

std::vector<std::unique_ptr<Board>> MakeLocalBoards(
    size_t tile_bytes, const std::vector<Doorbell*>& doorbells) {
  RJ_CHECK(IsTileSize(tile_bytes), "a tile's size must be a multiple of 4096");
  const int size = static_cast<int>(doorbells.size());
  auto memory = std::make_shared<LocalMemory>(BoardBytes(size, tile_bytes), doorbells);
  std::vector<std::unique_ptr<Board>> boards;
  for (int r = 0; r < size; ++r)
    boards.push_back(std::make_unique<LocalBoard>(memory, r, size, tile_bytes));
  return boards;
}

}  // namespace ringjax
