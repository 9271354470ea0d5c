// Submission: the description of one named operation, which a rank sends to all other
// ranks. A submission contains no addresses of tensors. This file has the functions
// that need only the description: checks, comparison and sizes. disagreement.h checks
// whether the submissions of several ranks fit together.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/dtype.h"
#include "base/short_vector.h"
#include "base/status.h"
#include "collective/schedule.h"
#include "engine/call/descriptor.h"

namespace ringjax {

// A Submission must not change once a SubmissionPtr refers to it. A grouped operation
// is one submission with many tensors.
struct Submission {
  struct Piece {
    DType dtype = DType::kF32;
    Dims dims;
    bool operator==(const Piece&) const = default;
    uint64_t bytes() const;
  };

  Collective op = Collective::kAllreduce;
  std::string name;
  ReduceOp reduce_op = ReduceOp::kSum;
  int root = 0;  // rank in the set
  double prescale = 1, postscale = 1;
  bool cuda = false;
  bool alone = false;   // whether the operation must not be fused with others
  bool placed = false;  // whether the rank has memory for the results
  ShortVector<Piece, 1> tensors;
  // For alltoall: the number of rows for each rank of the process set, first those of
  // tensor 0, then those of tensor 1, and so on. Empty means equal parts.
  std::vector<int64_t> splits;

  std::string Title() const;           // "allreduce 'grad'"
  std::string Describe() const;        // "allreduce 'grad' (f32[4], SUM)"
  bool Reduces() const;                // whether reduce_op and factors have a meaning
  bool Same(const Submission&) const;  // whether all members are equal
  uint64_t Hash() const;               // equal for submissions that are Same
};
using SubmissionPtr = std::shared_ptr<const Submission>;

// The submissions of one operation by all ranks. In most rounds all ranks have
// submitted the same, so that one pointer is enough, whatever the number of ranks.
class SubmissionsByRank {
 public:
  SubmissionsByRank() = default;
  // An entry is null if the rank has not submitted the operation.
  explicit SubmissionsByRank(std::vector<SubmissionPtr> each)
      : each_(std::move(each)), size_(each_.size()) {}
  // All `size` ranks have submitted `any`. The entry of `own_rank` is `own`, which
  // describes the same operation.
  SubmissionsByRank(SubmissionPtr any, size_t size, size_t own_rank, SubmissionPtr own)
      : any_(std::move(any)), own_(std::move(own)), own_rank_(own_rank), size_(size) {}

  size_t size() const { return size_; }
  const SubmissionPtr& operator[](size_t rank) const {
    if (!each_.empty()) return each_[rank];
    return rank == own_rank_ ? own_ : any_;
  }
  // Returns whether `holds(submission)` is true for all entries.
  template <typename Holds>
  bool AllOf(const Holds& holds) const {
    if (!each_.empty()) return std::all_of(each_.begin(), each_.end(), holds);
    return size_ == 0 || (holds(own_) && holds(any_));
  }

 private:
  std::vector<SubmissionPtr> each_;  // empty if all ranks have submitted `any_`
  SubmissionPtr any_, own_;
  size_t own_rank_ = 0, size_ = 0;
};

// Returns whether two factors have the same bits. Unlike ==, this is true for two equal
// NaNs and false for -0 and +0.
inline bool SameBits(double a, double b) {
  return std::bit_cast<uint64_t>(a) == std::bit_cast<uint64_t>(b);
}

// Returns kInvalidArgument if no set of `size` ranks can run the submission. The error
// does not name the operation. A rank checks its own submissions before it sends them,
// and the submissions of its peers when it receives them.
Status CheckSubmission(const Submission& submission, int size);

// Returns how many rows rank `rank` receives in a reducescatter of `rows` rows. If the
// rows cannot be divided evenly, the first ranks receive one row more.
int64_t ShareOf(int64_t rows, int rank, int size);
// Returns the bytes of the result of tensor `i` on rank `rank`. Must not be called for
// allgather and alltoall, whose result sizes depend on the submissions of other ranks.
uint64_t ResultBytes(const Submission& submission, size_t i, int rank, int size);

// Returns "f32[8,128]", or "f32[*,128]" if dim 0 may differ between ranks.
std::string Describe(const Submission::Piece& piece, bool ragged = false);

}  // namespace ringjax
