// Lists in slots, and reading what they tell. See tile_loans.h.
#include "engine/call/tile_loans.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <string>

#include "engine/call/message.h"
#include "transport/board.h"
#include "transport/loans.h"

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
    return process_vm_readv(getpid(), &to, 1, from, 2, 0) == sizeof ends;
  });
}

uint64_t Bytes(const std::vector<iovec>& pieces) {
  uint64_t bytes = 0;
  for (const iovec& piece : pieces) bytes += piece.iov_len;
  return bytes;
}

}  // namespace

TileLoans::TileLoans(const Memory& memory, const Lane& lane, bool wanted)
    : memory_(memory),
      lane_(lane),
      mine_(wanted),
      values_(lane.links.size()),
      results_(lane.links.size()) {
  for (const auto& link : lane_.links) {
    if (!link) continue;
    Loans* const loans = link->loans();
    // As early as can be: a peer lends once it has heard that this rank reads.
    if (loans != nullptr) loans->Meet();
    mine_ = mine_ && loans != nullptr && loans->Can();
  }
}

TileLoans::~TileLoans() {
  if (!mine_) return;
  for (const auto& link : lane_.links)
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
  const auto take = [slot](uint64_t first, uint64_t count) {
    Pieces list(count);
    std::memcpy(list.data(), slot + sizeof(Heads) + first * sizeof(iovec),
                count * sizeof(iovec));
    return list;
  };
  values_[peer] = take(0, heads.values);
  results_[peer] = take(heads.values, heads.results);
  if (Bytes(values_[peer]) != memory_.in->bytes()) return damaged;
  lane_.links[peer]->loans()->Meet();
  others_ = true;
  return OkStatus();
}

Status TileLoans::Read(int peer, const Pieces& pieces, uint64_t offset,
                       std::span<const iovec> to) {
  Loans& loans = *lane_.links[peer]->loans();
  rest_.assign(to.begin(), to.end());
  for (uint64_t left = Bytes(rest_); left > 0;) {
    from_.clear();
    PiecesOf(pieces, offset, left, kPieces, &from_);
    const Result<uint64_t> read = loans.Borrow(rest_, from_);
    if (!read.ok()) return {read.status().code(), read.status().message(), peer};
    const uint64_t n = read.value();
    if (n == 0 || n > left)
      return {Code::kUnavailable, "has memory that cannot be read, or has gone", peer};
    Pieces after;
    PiecesOf(rest_, n, left - n, rest_.size(), &after);
    rest_.swap(after);
    offset += n;
    left -= n;
  }
  return OkStatus();
}

}  // namespace ringjax
