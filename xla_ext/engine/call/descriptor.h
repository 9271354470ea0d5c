// What a rank is about to do, in a form that ranks can compare: a fingerprint on the
// fast path, words when the fingerprints differ.
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
  uint64_t room = 0;  // bytes at `out`

  uint64_t elements() const;
  uint64_t bytes() const { return elements() * Width(dtype); }
};

// One call of any framework, as all ranks must agree on it.
struct Call {
  Collective op = Collective::kAllreduce;
  ReduceOp reduce_op = ReduceOp::kSum;
  int wire = -1;  // DType number, or -1: as it is
  double prescale = 1.0, postscale = 1.0;
  int root = 0;
  int64_t step = -1;   // the caller's sequence number (optimizer state), -1 if none
  int64_t bucket = 0;  // which one of a step's calls
  // Seconds of waiting for other ranks until an error, 0: never; negative: what the
  // communicator has. Of this rank alone: nobody compares it.
  double timeout = -1;
  std::string_view name;   // of the operation: "grads"
  std::string_view names;  // of the tensors, joined by newlines; may be empty
  // Of shards of several devices: "2 devices (0, 1)", and on further lines how each
  // tensor is cut, compared and not shown. Empty: tensors are whole, on one device.
  std::string_view partition;
  std::vector<Tensor> tensors;
  // Rows (dim 0) per rank, for each tensor one after another; see Problem::counts.
  std::vector<int64_t> rows;
  bool rows_known = false;  // alltoall: rows came from all ranks, so they fit together
  bool beside = false;      // the program goes on meanwhile

  // Sets the three from numbers that came from outside, if there are such.
  Status SetKinds(int64_t op_number, int64_t reduce_number, int64_t wire_number);

  // "allreduce 'grads'", or "allreduce" if it has no name.
  std::string Title() const;
  std::string_view TensorName(size_t i) const;
  // Whether no result is written where any tensor lies.
  bool KeepsInputs() const;
};

// True if dim 0 may differ between ranks (its size is in rows instead).
bool RaggedRows(Collective op);

// kInvalidArgument if `op` cannot reduce this on so many ranks.
Status CheckReduction(Collective op, ReduceOp reduce_op, DType dtype, int size);

// Equal on all ranks exactly if the calls fit together.
uint64_t Fingerprint(const Call& call);

// "f32[8,128]", or "f32[*,128]" if dim 0 is a matter of each rank.
std::string Describe(DType dtype, std::span<const int64_t> dims, bool ragged = false);
std::string Describe(const Tensor& tensor, bool ragged = false);

// As short as tells it from every other number.
std::string Digits(double value);

// At most `limit` bytes of `text`, not ending within a character.
std::string_view Cut(std::string_view text, size_t limit);

// The longest text that a rank sends to explain its call.
inline constexpr size_t kMostText = 64 << 10;

// Lines for the peers, at most `limit` bytes: the operation, its options, one line per
// tensor. Parsed by nobody: compared and shown.
std::string Explain(const Call& call, size_t limit);

// Instead of Explain from a rank whose own call is not valid.
std::string Refusal(const std::string& why);
bool IsRefusal(std::string_view text);

// One sentence naming the first difference; texts[r] is Explain or Refusal of rank r
// and members[r] its world rank. The same on all ranks. `*culprit` is -1 if the texts
// do not tell.
std::string Mismatch(const std::vector<std::string>& texts,
                     const std::vector<int>& members, std::string_view communicator,
                     int* culprit);

}  // namespace ringjax
