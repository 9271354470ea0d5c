// Batches: fuses ready operations into a small number of Calls. All ranks build the
// same Calls in the same order. Batches only groups operations and copies no tensor
// data.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine/eager/negotiation.h"

namespace ringjax {

class Batches {
 public:
  // Fuses operations into one Call up to `threshold` bytes; 0 disables fusion. Appends
  // each new Call to `*decisions`, which must outlive this Batches object.
  Batches(uint64_t threshold, std::vector<Decision>* decisions)
      : threshold_(threshold), decisions_(decisions) {}

  // Adds the operation to a Call that still accepts tensors and has room for it, or
  // appends a new Call.
  void Add(Ready&& ready);

  void Append(Decision&& decision) { decisions_->push_back(std::move(decision)); }

  // Lets no Call accept further tensors, so that later operations start new Calls.
  void Close() { open_.clear(); }

 private:
  // The properties that must be equal for operations to be fused into one Call.
  struct Kind {
    uint64_t kinds = 0;  // op, reduce op, root and device, packed
    double prescale = 1, postscale = 1;
    bool operator==(const Kind&) const;
  };
  // A Call that still accepts tensors: its index in `*decisions_` and its bytes so far.
  struct Bin {
    Kind kind;
    size_t decision;
    uint64_t bytes;
  };
  static Kind KindOf(const Submission& submission);
  void AppendCall(Ready&& ready);

  uint64_t threshold_;
  std::vector<Decision>* decisions_;
  ShortVector<Bin, 1> open_;  // a map would be slower for the few kinds of a program
};

}  // namespace ringjax
