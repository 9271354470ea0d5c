// The description of a call in two forms that ranks compare: a fingerprint for every
// call, and a text if the fingerprints differ.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/dtype.h"
#include "base/status.h"
#include "collective/schedule.h"
#include "engine/call/dims.h"

namespace ringjax {

struct Tensor {
  DType dtype = DType::kF32;
  Dims dims;
  void* in = nullptr;
  void* out = nullptr;
  uint64_t room = 0;  // bytes of the memory at `out`

  uint64_t elements() const;
  uint64_t bytes() const { return elements() * Width(dtype); }
};

// A call of any framework as one rank makes it. All properties in its fingerprint must
// be equal on all ranks.
struct Call {
  Collective op = Collective::kAllreduce;
  ReduceOp reduce_op = ReduceOp::kSum;
  int wire = -1;  // number of the wire dtype; -1 means the dtype of the tensor
  double prescale = 1.0, postscale = 1.0;
  int root = 0;
  int64_t step = -1;   // the caller's training step (optimizer state), -1 if none
  int64_t bucket = 0;  // number of the call within the training step
  // Seconds without progress until the call fails. 0: never; negative: the timeout of
  // the communicator. May differ between ranks.
  double timeout = -1;
  std::string_view name;   // the name of the operation: "grads"
  std::string_view names;  // the names of the tensors, one on each line; may be empty
  // For shards on several devices: the line "2 devices (0, 1)", then lines that say how
  // each tensor is cut. All lines are compared, but errors show only the first. Empty:
  // the tensors are whole, on one device.
  std::string_view partition;
  std::vector<Tensor> tensors;
  // The sizes of dim 0 by rank: a list for each tensor in turn; see Problem::counts.
  std::vector<int64_t> rows;
  bool rows_known = false;  // alltoall: rows were negotiated, so they fit together
  bool overlapped = false;  // the program continues during the call (recorded only)

  // Sets op, reduce_op and wire. kInvalidArgument if one of the numbers is unknown.
  Status SetKinds(int64_t op_number, int64_t reduce_number, int64_t wire_number);

  // "allreduce 'grads'", or "allreduce" if it has no name.
  std::string Title() const;
  std::string_view TensorName(size_t i) const;
  // Whether no result overlaps any input, so that the call can run again.
  bool KeepsInputs() const;
};

// Whether dim 0 may differ between ranks. Call::rows then has its size on each rank.
bool RaggedRows(Collective op);

// kInvalidArgument if `op` cannot apply `reduce_op` to `dtype` on `size` ranks.
Status CheckReduction(Collective op, ReduceOp reduce_op, DType dtype, int size);

// A hash of all properties of a call that must be equal on all ranks. The rows of an
// alltoall differ between ranks and are compared separately.
uint64_t Fingerprint(const Call& call);

// "f32[8,128]", or "f32[*,128]" if `ragged`: dim 0 may differ between ranks.
std::string Describe(DType dtype, std::span<const int64_t> dims, bool ragged = false);
std::string Describe(const Tensor& tensor, bool ragged = false);

// The shortest decimal text that identifies the number.
std::string Digits(double value);

// At most the first `limit` bytes of `text`; does not end within a UTF-8 character.
std::string_view Cut(std::string_view text, size_t limit);

// Bytes of the longest text that a rank sends to explain its call.
inline constexpr size_t kMostText = 64 << 10;

// The text about a call that Mismatch compares line by line, at most `limit` bytes: the
// operation, its options, and one line for each tensor.
std::string Explain(const Call& call, size_t limit);

// The text of a rank whose own call is not valid, in place of Explain.
std::string Refusal(const std::string& why);
bool IsRefusal(std::string_view text);

// Returns an error text that names the first refusal, or else the first difference. The
// text is the same on all ranks. texts[r] is Explain or Refusal of rank r, members[r]
// its world rank. `*culprit` is the world rank that refuses or differs, or -1 if all
// texts are equal, because they were cut before the difference.
std::string Mismatch(const std::vector<std::string>& texts,
                     const std::vector<int>& members, std::string_view communicator,
                     int* culprit);

}  // namespace ringjax
