// Spans: the memory of a request as a list of pieces, addressed as if the pieces were
// one contiguous vector.
//
// Therefore fusion needs no copy on the CPU: a schedule treats many gradients as one
// long vector, and the gradients need not be packed.
#pragma once

#include <sys/uio.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/short_vector.h"
#include "base/status.h"

namespace ringjax {

struct Span {
  std::byte* data = nullptr;
  uint64_t bytes = 0;
};

// Not thread-safe: even the const functions update a cached position.
class Spans {
 public:
  // Reserves room for `pieces` pieces. A training step may have thousands of pieces,
  // and a vector that grows by doubling would touch new pages in every call.
  void Reserve(size_t pieces) { pieces_.reserve(pieces); }

  // Appends a piece. Drops an empty piece, whose pointer may be invalid. Merges a piece
  // with the previous piece if the two are adjacent in memory.
  void Add(void* data, uint64_t bytes) {
    if (bytes == 0) return;
    auto* begin = static_cast<std::byte*>(data);
    if (!pieces_.empty() && pieces_.back().data + pieces_.back().bytes == begin)
      pieces_.back().bytes += bytes;
    else
      pieces_.push_back({begin, bytes, total_});
    total_ += bytes;
  }
  uint64_t bytes() const { return total_; }
  bool empty() const { return total_ == 0; }

  // Returns the longest contiguous piece that begins at `offset`, at most `limit`
  // bytes. `offset` must be less than bytes().
  Span At(uint64_t offset, uint64_t limit) const {
    RJ_CHECK(offset < total_, "memory is asked for behind the end of a tensor");
    const Piece& piece = pieces_[Find(offset)];
    const uint64_t skip = offset - piece.start;
    return {piece.data + skip, std::min(limit, piece.bytes - skip)};
  }

  // Calls visit(piece) for the contiguous pieces of [offset, offset + bytes), in order.
  template <typename Visit>
  void ForPieces(uint64_t offset, uint64_t bytes, Visit visit) const {
    while (bytes > 0) {
      const Span piece = At(offset, bytes);
      visit(piece);
      offset += piece.bytes;
      bytes -= piece.bytes;
    }
  }

  // Appends the pieces of [offset, offset + bytes) to `out`, but at most `most` pieces.
  void Pieces(uint64_t offset, uint64_t bytes, size_t most,
              std::vector<iovec>* out) const {
    for (size_t i = bytes ? Find(offset) : 0; bytes > 0 && most > 0; ++i, --most) {
      const uint64_t skip = offset - pieces_[i].start;
      const uint64_t n = std::min(bytes, pieces_[i].bytes - skip);
      out->push_back({pieces_[i].data + skip, n});
      offset += n;
      bytes -= n;
    }
  }

 private:
  struct Piece {
    std::byte* data;
    uint64_t bytes;
    uint64_t start;  // offset of the piece in the vector
  };

  // Returns the index of the piece that holds `offset`. Steps move forward through the
  // memory, so the last result is tried first, and then the piece after it.
  size_t Find(uint64_t offset) const {
    size_t i = hint_;
    if (!Holds(i, offset) && !Holds(++i, offset)) {
      auto after = std::upper_bound(
          pieces_.begin(), pieces_.end(), offset,
          [](uint64_t place, const Piece& piece) { return place < piece.start; });
      i = static_cast<size_t>(after - pieces_.begin()) - 1;
    }
    hint_ = i;
    return i;
  }
  bool Holds(size_t i, uint64_t offset) const {
    return i < pieces_.size() && offset - pieces_[i].start < pieces_[i].bytes;
  }

  ShortVector<Piece, 1> pieces_;
  uint64_t total_ = 0;
  mutable size_t hint_ = 0;  // index of the piece that Find has found last
};

}  // namespace ringjax
