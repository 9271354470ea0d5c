// Fusion: packs ready operations into a small number of Calls. All ranks make the same
// Calls in the same order. The class copies no data.
#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "engine/eager/negotiation.h"

namespace ringjax {

class Batches {
 public:
  // A Call of several operations has at most `threshold` bytes; 0 disables fusion. The
  // object appends Calls to `*decisions`, which must outlive the object.
  Batches(uint64_t threshold, std::vector<Decision>* decisions)
      : threshold_(threshold), decisions_(decisions) {}

  // Adds the operation to an open Call in which it fits, or appends a new Call.
  void Add(Ready ready);

  void Append(Decision decision) { decisions_->push_back(std::move(decision)); }

  // Closes all open Calls, so that later operations get new Calls.
  void Close() { open_.clear(); }

 private:
  // The properties that all operations of one Call have in common.
  struct Kind {
    uint64_t kinds = 0;  // op, reduce op, root and device, packed
    double prescale = 1, postscale = 1;
    bool operator==(const Kind&) const;
  };
  struct KindHash {
    size_t operator()(const Kind& kind) const;
  };
  // An open Call: its index in `*decisions_` and its bytes so far.
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
