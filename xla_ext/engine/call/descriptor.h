// The description of a call, in two forms that ranks compare: a fingerprint for every
// call, and a text that the ranks exchange if their fingerprints differ.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/dtype.h"
#include "base/status.h"
#include "collective/schedule.h"

namespace ringjax {

// The dimensions of a tensor. Up to six dimensions need no allocation, because in a
// call with hundreds of tensors allocations would take most of the time to describe the
// call.
class Dims {
 public:
  Dims() = default;
  Dims(std::initializer_list<int64_t> dims) { assign(dims.begin(), dims.end()); }
  Dims(const std::vector<int64_t>& dims) {  // NOLINT: implicit by design
    assign(dims.begin(), dims.end());
  }

  template <typename Iterator>
  void assign(Iterator first, Iterator last) {
    size_ = static_cast<size_t>(last - first);
    if (size_ > kInline) more_.assign(first, last);
    std::copy(first, size_ > kInline ? first : last, few_.begin());
  }

  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  const int64_t* begin() const { return size_ > kInline ? more_.data() : few_.data(); }
  const int64_t* end() const { return begin() + size_; }
  int64_t operator[](size_t i) const { return begin()[i]; }

 private:
  static constexpr size_t kInline = 6;

  size_t size_ = 0;
  std::array<int64_t, kInline> few_;
  std::vector<int64_t> more_;  // all dimensions, if there are more than kInline
};

struct Tensor {
  DType dtype = DType::kF32;
  Dims dims;
  void* in = nullptr;
  void* out = nullptr;
  uint64_t room = 0;  // bytes of the memory at `out`

  uint64_t elements() const;
  uint64_t bytes() const { return elements() * Width(dtype); }
};

// A collective call as one rank makes it. The properties that Fingerprint hashes must
// be equal on all ranks.
struct Call {
  Collective op = Collective::kAllreduce;
  ReduceOp reduce_op = ReduceOp::kSum;
  int wire = -1;  // number of the wire dtype; -1 means the dtype of the tensor
  double prescale = 1.0, postscale = 1.0;
  int root = 0;
  int64_t step = -1;   // the caller's training step (optimizer state), -1 if none
  int64_t bucket = 0;  // number of the call within the training step
  // Seconds without progress until the call fails; 0 means never, and a negative number
  // means the timeout of the communicator. May differ between ranks.
  double timeout = -1;
  std::string_view name;   // the name of the operation: "grads"
  std::string_view names;  // the names of the tensors, one on each line; may be empty
  // For shards on several devices: the line "2 devices (0, 1)", then lines that say how
  // each tensor is cut. All lines are compared, but errors show only the first line.
  // Empty if each tensor is whole and on one device.
  std::string_view partition;
  std::vector<Tensor> tensors;
  // The sizes of dim 0 on each rank, one list after the other for each tensor. See
  // Problem::counts for the order in a list.
  std::vector<int64_t> rows;
  bool rows_known = false;  // alltoall: the negotiation has compared `rows` already
  bool overlapped = false;  // the program continues during the call; only recorded

  // Sets op, reduce_op and wire. Returns kInvalidArgument if a number is unknown.
  Status SetKinds(int64_t op_number, int64_t reduce_number, int64_t wire_number);

  // Returns "allreduce 'grads'", or "allreduce" if the call has no name.
  std::string Title() const;
  std::string_view TensorName(size_t i) const;
  // Returns whether no result overlaps any input, so that the call can run again.
  bool KeepsInputs() const;
};

// Returns whether dim 0 of a tensor may differ between ranks in this collective. Then
// Call::rows has the size of dim 0 on each rank.
bool RaggedRows(Collective op);

// Returns kInvalidArgument if `op` cannot apply `reduce_op` to `dtype` on `size` ranks.
Status CheckReduction(Collective op, ReduceOp reduce_op, DType dtype, int size);

// Returns a hash of all properties of a call that must be equal on all ranks. The rows
// of an alltoall differ between ranks and are compared separately.
uint64_t Fingerprint(const Call& call);

// Returns "f32[8,128]", or "f32[*,128]" if `ragged`, where dim 0 may differ by rank.
std::string Describe(DType dtype, std::span<const int64_t> dims, bool ragged = false);
std::string Describe(const Tensor& tensor, bool ragged = false);

// Returns the shortest decimal text that identifies the number.
std::string Digits(double value);

// Returns at most the first `limit` bytes of `text`, and no part of a UTF-8 character.
std::string_view Cut(std::string_view text, size_t limit);

// Returns line `number` of `lines`, counted from 0; empty if there are fewer lines.
std::string_view Line(std::string_view lines, size_t number);

// Bytes of the longest text that a rank sends to explain its call.
inline constexpr size_t kMaxText = 64 << 10;

// Returns a text about a call, at most `limit` bytes: the operation, its options, and a
// line for each tensor. Mismatch compares these texts line by line.
std::string Explain(const Call& call, size_t limit);

// Returns the text that a rank whose own call is not valid sends in place of Explain.
std::string Refusal(const std::string& why);
bool IsRefusal(std::string_view text);

// Returns an error text that names the first refusal, or without refusals the first
// difference. The text is the same on all ranks. texts[r] is the Explain or Refusal
// text of rank r, and members[r] its world rank. `*culprit` is the world rank that
// refuses or differs, or -1 if all texts are equal, because they were cut before the
// difference.
std::string Mismatch(const std::vector<std::string>& texts,
                     const std::vector<int>& members, std::string_view communicator,
                     int* culprit);

}  // namespace ringjax
