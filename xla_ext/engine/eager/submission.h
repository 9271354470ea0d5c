// A submission: one named operation of one rank, as that rank describes it to all
// others; and what follows from the description alone: is it possible, is it the same
// as another, how many bytes has it. No addresses, no state; whether those of several
// ranks fit together is in disagreement.h.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "base/status.h"
#include "collective/schedule.h"

namespace ringjax {

// Immutable once it is shared. A grouped operation is one submission of many tensors.
struct Submission {
  struct Piece {
    DType dtype = DType::kF32;
    std::vector<int64_t> dims;
    bool operator==(const Piece&) const = default;
    uint64_t bytes() const;
  };

  Collective op = Collective::kAllreduce;
  std::string name;
  ReduceOp reduce_op = ReduceOp::kSum;
  int root = 0;  // rank in the set
  double prescale = 1, postscale = 1;
  bool cuda = false;
  bool alone = false;   // never fused with others
  bool placed = false;  // its rank has memory for the results
  std::vector<Piece> tensors;
  // alltoall: rows for each rank of the set, tensor by tensor; empty: equal parts.
  std::vector<int64_t> splits;

  std::string Title() const;           // "allreduce 'grad'"
  std::string Describe() const;        // "allreduce 'grad' (f32[4], SUM)"
  bool Reduces() const;                // reduce_op and the factors mean something
  bool Same(const Submission&) const;  // in everything
  uint64_t Hash() const;               // equal if Same
};
using SubmissionPtr = std::shared_ptr<const Submission>;

// kInvalidArgument, without a title, if no rank of a set of `size` ranks can mean this.
// The caller checks its own submissions with it, negotiation checks what peers
// describe.
Status CheckSubmission(const Submission& submission, int size);

// The part of rank `rank` in a reducescatter of so many rows: of what cannot be
// divided, the first ranks have one more.
int64_t ShareOf(int64_t rows, int rank, int size);
// Of tensor `i`, if the operation's results have known sizes.
uint64_t ResultBytes(const Submission& submission, size_t i, int rank, int size);

// "f32[8,128]", or "f32[*,128]" if dim 0 is a matter of each rank.
std::string Describe(const Submission::Piece& piece, bool ragged = false);

}  // namespace ringjax
