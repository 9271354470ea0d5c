// Long messages of a board, lent: a rank writes to its slot only where its values and
// results lie, and the others read them there (transport/loans.h). Who adds up what, in
// which order, and who waits for whom is as it is with tiles, so the bits are, too.
//
// Each rank says by itself whether it lends this message. Nobody returns from it before
// all have what they need.
#pragma once

#include <sys/uio.h>

#include <vector>

#include "engine/call/executor.h"

namespace ringjax {

class TileLoans {
 public:
  using Pieces = std::vector<iovec>;

  // `wanted`: whether this rank lends if all others can read its memory.
  TileLoans(const Memory& memory, const Lane& lane, bool wanted);
  // Before End, the call has come to nothing: see Withdraw.
  ~TileLoans();
  TileLoans(const TileLoans&) = delete;
  TileLoans& operator=(const TileLoans&) = delete;

  bool mine() const { return mine_; }
  bool any() const { return mine_ || !values_.empty(); }
  bool Lends(int peer) const {
    return !values_.empty() && !values_[static_cast<size_t>(peer)].empty();
  }

  // Before this rank's first tile is posted. `slot`: `bytes` of the board for a list.
  void Show(std::byte* slot, uint64_t bytes);
  // Once a peer has posted its first tile: whether it lends, and what.
  Status Learn(int peer, const std::byte* slot, uint64_t bytes);
  // Whether all have read what they need is another's matter from now on.
  void End() { mine_ = false; }
  // Which has come to nothing: what this rank has lent last, of all messages, is not to
  // be trusted any more.
  static void Withdraw(const Lane& lane);

  // Bytes of a peer's values, from `offset` on, to `to`; or of its results.
  Status Values(int peer, uint64_t offset, const Pieces& to) {
    return Read(peer, values_[static_cast<size_t>(peer)], offset, to);
  }
  Status Results(int peer, uint64_t offset, const Pieces& to) {
    return Read(peer, results_[static_cast<size_t>(peer)], offset, to);
  }

 private:
  Status Read(int peer, const Pieces& pieces, uint64_t offset, const Pieces& to);

  const Memory& memory_;
  const Lane& lane_;
  bool mine_ = false;
  std::vector<Pieces> values_, results_;  // of each peer that lends, if any does
  Pieces from_, to_;                      // of one call of the kernel
};

}  // namespace ringjax
