// Long messages of a board, lent: a rank writes to its slot only where its values and
// results lie, and the others read them there (transport/loans.h). Who adds up what, in
// which order, and who waits for whom is as it is with tiles, so the bits are, too.
//
// Each rank says by itself whether it lends this message. Nobody returns from it before
// all have what they need.
#pragma once

#include <sys/uio.h>

#include <span>
#include <vector>

#include "engine/call/executor.h"

namespace ringjax {

class TileLoans {
 public:
  // `wanted`: whether this rank lends if all others can read its memory.
  TileLoans(const Memory& memory, const Lane& lane, bool wanted);
  // Tells who reads here that it cannot be trusted any more, unless all have ended.
  ~TileLoans();
  TileLoans(const TileLoans&) = delete;
  TileLoans& operator=(const TileLoans&) = delete;

  bool mine() const { return mine_; }
  bool any() const { return mine_ || others_; }
  bool Lends(int peer) const { return !values_[static_cast<size_t>(peer)].empty(); }

  // Before this rank's first tile is posted. `slot`: `bytes` of the board for a list.
  void Show(std::byte* slot, uint64_t bytes);
  // Once a peer has posted its first tile: whether it lends, and what.
  Status Learn(int peer, const std::byte* slot, uint64_t bytes);
  // All have read what they need: what was lent is ours again.
  void End() { mine_ = false; }

  // Bytes of a peer's values, from `offset` on, to `to`; or of its results.
  Status Values(int peer, uint64_t offset, std::span<const iovec> to) {
    return Read(peer, values_[static_cast<size_t>(peer)], offset, to);
  }
  Status Results(int peer, uint64_t offset, std::span<const iovec> to) {
    return Read(peer, results_[static_cast<size_t>(peer)], offset, to);
  }

 private:
  using Pieces = std::vector<iovec>;

  Status Read(int peer, const Pieces& pieces, uint64_t offset,
              std::span<const iovec> to);

  const Memory& memory_;
  const Lane& lane_;
  bool mine_ = false, others_ = false;
  std::vector<Pieces> values_, results_;  // of each peer that lends
  Pieces from_, rest_;
};

}  // namespace ringjax
