// Fusion: puts what has become ready into as few Calls as fit, in order, alike on all
// ranks. Nothing is copied here; it only decides.
#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "engine/eager/negotiation.h"

namespace ringjax {

class Batches {
 public:
  // At most `threshold` bytes in one Call of several submissions.
  Batches(uint64_t threshold, std::vector<Decision>* decisions)
      : threshold_(threshold), decisions_(decisions) {}

  // Joins a Call that it fits into, or opens one behind all decisions so far.
  void Add(Ready ready);

  void Append(Decision decision) { decisions_->push_back(std::move(decision)); }

  // What comes after this goes into no Call from before.
  void Close() { open_.clear(); }

 private:
  // What one Call has in common.
  struct Kind {
    uint64_t kinds = 0;  // op, reduce op, root, device
    double prescale = 1, postscale = 1;
    bool operator==(const Kind&) const;
  };
  struct KindHash {
    size_t operator()(const Kind& kind) const;
  };
  struct Bin {
    size_t decision;
    uint64_t bytes;
  };
  static Kind KindOf(const Submission& submission);

  uint64_t threshold_;
  std::vector<Decision>* decisions_;
  std::unordered_map<Kind, std::vector<Bin>, KindHash> open_;
};

}  // namespace ringjax
