// A submission: one named operation of one rank, as that rank describes it to all
// others, and all that follows from the description alone: whether it is possible,
// whether it is the same as another one, and how many bytes it has. It contains no
// addresses and no state. Whether the submissions of several ranks fit together is
// checked in disagreement.h.
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
  bool placed = false;  // the rank that submits it has memory for the results
  std::vector<Piece> tensors;
  // alltoall: rows for each rank of the set, tensor after tensor; empty: equal parts.
  std::vector<int64_t> splits;

  std::string Title() const;           // "allreduce 'grad'"
  std::string Describe() const;        // "allreduce 'grad' (f32[4], SUM)"
  bool Reduces() const;                // whether reduce_op and factors have a meaning
  bool Same(const Submission&) const;  // equal in everything
  uint64_t Hash() const;               // equal if Same
};
using SubmissionPtr = std::shared_ptr<const Submission>;

// Returns kInvalidArgument, without a title, if the submission is impossible in a set
// of `size` ranks. A rank checks its own submissions before it sends them, and those of
// its peers when it receives them.
Status CheckSubmission(const Submission& submission, int size);

// The rows that rank `rank` gets in a reducescatter of `rows` rows. If they cannot be
// divided evenly, each of the first ranks has one row more.
int64_t ShareOf(int64_t rows, int rank, int size);
// Bytes of the result of tensor `i` on rank `rank`. Not for allgather and alltoall,
// where the submissions of other ranks determine the size as well.
uint64_t ResultBytes(const Submission& submission, size_t i, int rank, int size);

// Returns "f32[8,128]", or "f32[*,128]" if dim 0 may differ between ranks.
std::string Describe(const Submission::Piece& piece, bool ragged = false);

}  // namespace ringjax
