// Symbolic memory for the verifier. In place of numbers, the memory holds intervals of
// elements, each with the set of ranks that contributed to it. Only verify.cc uses this
// memory; its header says what is proved.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "base/status.h"

namespace ringjax::symbolic {

// A set of ranks.
class Ranks {
 public:
  Ranks() = default;
  Ranks(int rank, int size) : words_(static_cast<size_t>(size + 63) / 64) {
    words_[static_cast<size_t>(rank) / 64] = uint64_t{1} << (rank % 64);
  }
  bool Meets(const Ranks& other) const {
    for (size_t i = 0; i < words_.size(); ++i)
      if (words_[i] & other.words_[i]) return true;
    return false;
  }
  void Add(const Ranks& other) {
    if (words_.empty()) words_.resize(other.words_.size());
    for (size_t i = 0; i < words_.size(); ++i) words_[i] |= other.words_[i];
  }
  bool operator==(const Ranks&) const = default;

 private:
  std::vector<uint64_t> words_;
};

// The symbolic value of one interval: contributions of the ranks `who` to the elements
// of the vector from `position` on. In a collective that only moves data, `who` is the
// rank that the data come from, and `position` counts in the kIn of that rank.
struct Value {
  Ranks who;
  uint64_t position = 0;
  bool raw = false;       // whether this is the input of a rank, not yet prescaled
  bool finished = false;  // whether a step with `last` has written the value
  uint64_t depth = 0;     // messages in the longest chain that led to the value
};

struct Piece {
  uint64_t count = 0;
  Value value;
};
using Pieces = std::vector<Piece>;

// One region of one rank: its written intervals, by offset.
class Memory {
 public:
  // Returns nullopt if one of the elements was never written.
  std::optional<Pieces> Read(uint64_t offset, uint64_t count) const {
    Pieces pieces;
    auto cell = cells_.upper_bound(offset);
    if (cell != cells_.begin()) --cell;
    for (uint64_t at = offset; at < offset + count; ++cell) {
      if (cell == cells_.end() || cell->first > at) return std::nullopt;
      const uint64_t skip = at - cell->first;
      if (skip >= cell->second.count) return std::nullopt;
      const uint64_t n = std::min(cell->second.count - skip, offset + count - at);
      pieces.push_back({n, cell->second.value});
      pieces.back().value.position += skip;
      at += n;
    }
    return pieces;
  }

  // Returns whether any of the elements was written.
  bool Touches(uint64_t offset, uint64_t count) const {
    const auto cell = cells_.lower_bound(offset + count);
    if (cell == cells_.begin()) return false;
    const auto& [begin, piece] = *std::prev(cell);
    return begin + piece.count > offset;
  }

  void Write(uint64_t offset, const Pieces& pieces) {
    uint64_t count = 0;
    for (const Piece& piece : pieces) count += piece.count;
    CutAt(offset);
    CutAt(offset + count);
    cells_.erase(cells_.lower_bound(offset), cells_.lower_bound(offset + count));
    for (const Piece& piece : pieces) {
      cells_[offset] = piece;
      offset += piece.count;
    }
  }

 private:
  void CutAt(uint64_t offset) {
    auto cell = cells_.lower_bound(offset);
    if (cell == cells_.begin()) return;
    auto& [begin, piece] = *--cell;
    const uint64_t head = offset - begin;
    if (head >= piece.count) return;
    Piece tail{piece.count - head, piece.value};
    tail.value.position += head;
    piece.count = head;
    cells_[offset] = std::move(tail);
  }

  std::map<uint64_t, Piece> cells_;
};

// Reduces two operands of equal size. Fails if the operands are for different elements
// of the vector, if one is finished, or if a rank contributed to both.
inline Result<Pieces> Reduce(const Pieces& own, const Pieces& received) {
  const auto bad = [](const char* what) { return Status(Code::kInternal, what); };
  Pieces result;
  uint64_t own_skip = 0, skip = 0;  // elements of own[i], received[j] that are used
  for (size_t i = 0, j = 0; i < own.size() && j < received.size();) {
    const Value &a = own[i].value, &b = received[j].value;
    const uint64_t n = std::min(own[i].count - own_skip, received[j].count - skip);
    if (a.position + own_skip != b.position + skip)
      return bad("it combines different elements");
    if (a.finished || b.finished) return bad("it adds to a finished result");
    if (a.who.Meets(b.who)) return bad("it takes a contribution twice");
    result.push_back({n, a});
    Value& value = result.back().value;
    value.position += own_skip;
    value.depth = std::max(a.depth, b.depth);
    value.who.Add(b.who);
    own_skip += n;
    skip += n;
    if (own_skip == own[i].count) ++i, own_skip = 0;
    if (skip == received[j].count) ++j, skip = 0;
  }
  return result;
}

}  // namespace ringjax::symbolic
