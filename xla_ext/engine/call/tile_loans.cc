// Lists in slots, and reading what they tell. See tile_loans.h.
#include "engine/call/tile_loans.h"

#include <algorithm>
#include <cstring>

#include "engine/call/message.h"
#include "transport/board.h"
#include "transport/loans.h"
#include "transport/process_memory.h"

namespace ringjax {
namespace {

constexpr size_t kPieces = 64;  // in one call of the kernel

// In front of the pieces: how many tell of values, and how many of results after them.
struct Heads {
  uint64_t values, results;
};

// Memory of a device may be mapped so that no process may read another's.
bool IsReadable(const std::vector<iovec>& pieces) {
  return std::all_of(pieces.begin(), pieces.end(), [](const iovec& piece) {
    auto* first = static_cast<std::byte*>(piece.iov_base);
    std::byte ends[2];
    const iovec to{ends, sizeof ends};
    const iovec from[2] = {{first, 1}, {first + piece.iov_len - 1, 1}};
    return ReadMemory(OwnMemory(), {&to, 1}, from) == sizeof ends;
  });
}

uint64_t Bytes(const std::vector<iovec>& pieces) {
  uint64_t bytes = 0;
  for (const iovec& piece : pieces) bytes += piece.iov_len;
  return bytes;
}

}  // namespace

TileLoans::TileLoans(const Memory& memory, const Lane& lane, bool wanted)
    : memory_(memory), lane_(lane), mine_(wanted) {
  for (const auto& link : lane_.links) {
    if (!link) continue;
    Loans* const loans = link->loans();
    // As early as can be: a peer lends once it has heard that this rank reads.
    if (loans != nullptr) loans->Meet();
    mine_ = mine_ && loans != nullptr && loans->Can();
  }
}

TileLoans::~TileLoans() {
  if (mine_) Withdraw(lane_);
}

void TileLoans::Withdraw(const Lane& lane) {
  if (!lane.board || lane.board->Get(Board::kLends, lane.rank) == 0) return;
  for (const auto& link : lane.links)
    if (link) link->loans()->Withdraw();
}

void TileLoans::Show(std::byte* slot, uint64_t bytes) {
  if (mine_) {
    const uint64_t most = std::min<uint64_t>(
        kMostLent, (std::max(bytes, sizeof(Heads)) - sizeof(Heads)) / sizeof(iovec));
    Pieces list;
    memory_.in->Pieces(0, memory_.in->bytes(), most + 1, &list);
    Heads heads{list.size(), 0};
    memory_.out->Pieces(0, memory_.out->bytes(), most + 1, &list);
    heads.results = list.size() - heads.values;
    mine_ = list.size() <= most && IsReadable(list);
    if (mine_) {
      std::memcpy(slot, &heads, sizeof heads);
      std::memcpy(slot + sizeof heads, list.data(), list.size() * sizeof(iovec));
    }
  }
  lane_.board->Set(Board::kLends, mine_ ? 1 : 0);
}

Status TileLoans::Learn(int peer, const std::byte* slot, uint64_t bytes) {
  if (lane_.board->Get(Board::kLends, peer) == 0) return OkStatus();
  const Status damaged(Code::kUnavailable, "shared memory is damaged: impossible loan",
                       peer);
  Heads heads;
  if (bytes < sizeof heads || lane_.links[peer]->loans() == nullptr) return damaged;
  std::memcpy(&heads, slot, sizeof heads);
  const uint64_t most = (bytes - sizeof heads) / sizeof(iovec);
  if (heads.values > most || heads.results > most - heads.values) return damaged;
  auto take = [at = slot + sizeof heads](uint64_t count) mutable {
    Pieces list(count);
    for (iovec& piece : list) {
      std::memcpy(&piece, at, sizeof piece);
      at += sizeof piece;
    }
    return list;
  };
  values_.resize(lane_.links.size());
  results_.resize(lane_.links.size());
  values_[peer] = take(heads.values);
  results_[peer] = take(heads.results);
  if (Bytes(values_[peer]) != memory_.in->bytes()) return damaged;
  return OkStatus();
}

Status TileLoans::Read(int peer, const Pieces& pieces, uint64_t offset,
                       const Pieces& to) {
  Loans& loans = *lane_.links[peer]->loans();
  const uint64_t all = Bytes(to);
  for (uint64_t done = 0; done < all;) {
    from_.clear();
    to_.clear();
    PiecesOf(pieces, offset + done, all - done, kPieces, &from_);
    PiecesOf(to, done, all - done, kPieces, &to_);
    const Result<uint64_t> read = loans.Borrow(to_, from_);
    if (!read.ok()) return {read.status().code(), read.status().message(), peer};
    if (read.value() == 0 || read.value() > all - done)
      return {Code::kUnavailable, "has memory that cannot be read, or has gone", peer};
    done += read.value();
  }
  return OkStatus();
}

}  // namespace ringjax
