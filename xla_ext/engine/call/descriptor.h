// Call: the description of a collective call. Ranks compare a fingerprint of every
// call, and exchange a text about the call only if their fingerprints differ.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/dtype.h"
#include "base/short_vector.h"
#include "base/status.h"
#include "collective/schedule.h"

namespace ringjax {

// The dimensions of a tensor. A call may have hundreds of tensors, so few dimensions
// are stored without an allocation.
using Dims = ShortVector<int64_t, 6>;

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
  int wire = -1;  // code of the wire dtype; -1 means the dtype of the tensor
  double prescale = 1.0, postscale = 1.0;
  int root = 0;
  int64_t step = -1;   // the caller's training step (optimizer state), -1 if none
  int64_t bucket = 0;  // index of the call within the training step
  // The call fails after this many seconds without progress. 0 means no limit, and a
  // negative value means the timeout of the communicator. May differ between ranks.
  double timeout = -1;
  std::string_view name;   // the name of the operation: "grads"
  std::string_view names;  // the names of the tensors, one on each line; may be empty
  // If the tensors are cut into shards on several devices: the line "2 devices (0, 1)",
  // then lines that say how each tensor is cut. All lines are compared, but errors show
  // only the first line. Empty if each tensor is whole and on one device.
  std::string_view partition;
  std::vector<Tensor> tensors;
  // For each tensor in turn, a list with the size of dim 0 on each rank.
  // Problem::counts describes the order within a list.
  std::vector<int64_t> rows;
  // Alltoall: whether the negotiation has compared `rows` already, and whether it has
  // found that all rows of each tensor are the same number on all ranks.
  bool rows_known = false, even = false;
  bool overlapped = false;  // the program continues during the call; only recorded
  // JAX's name of the operation, "psum", if the call is a collective of JAX. Only
  // recorded, with the name of the communicator. In memory that is never freed.
  std::string_view jax_op;

  // Sets op, reduce_op and wire. Returns kInvalidArgument if a code is unknown.
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

// The tensors of an exchange of exact sums, in their order. See exact_exchange.h.
struct ExchangeTensor {
  static constexpr size_t kSums = 0, kControl = 1, kMaxima = 2, kUnits = 3,
                          kChecksum = 4, kNumber = 5;
};

// Returns the units of an exchange of exact sums, which must be equal on all ranks.
std::span<const int32_t> UnitsOf(const Call& call);

// Returns a hash of all properties of a call that must be equal on all ranks. The rows
// of an alltoall differ between ranks and are compared separately.
uint64_t Fingerprint(const Call& call);

// Returns a hash of the rows of an alltoall on `size` ranks if all rows of each tensor
// are the same number, and otherwise 0.
uint64_t EvenRows(const Call& call, int size);

// Returns "f32[8,128]", or "f32[*,128]" if dim 0 may differ between ranks (`ragged`).
std::string Describe(DType dtype, std::span<const int64_t> dims, bool ragged = false);
std::string Describe(const Tensor& tensor, bool ragged = false);

// Returns the shortest decimal text that is read back as exactly `value`.
std::string Digits(double value);

// Returns at most the first `limit` bytes of `text`, without splitting a UTF-8
// character.
std::string_view Cut(std::string_view text, size_t limit);

// Returns line `number` of `lines`, counted from 0, or "" if there are fewer lines.
std::string_view Line(std::string_view lines, size_t number);

// The most bytes of the text that a rank sends to explain its call after a mismatch.
inline constexpr size_t kMaxText = 64 << 10;

// Describes a call in a text of at most `limit` bytes: the operation, its options, and
// a line for each tensor. Mismatch compares these texts line by line.
std::string Explain(const Call& call, size_t limit);

// Returns the text that a rank sends in place of Explain if its own call is not valid.
std::string Refusal(const std::string& why);
bool IsRefusal(std::string_view text);

// Returns an error message, equal on all ranks, that names the first rank that refuses
// the call or, if no rank refuses, the first difference. texts[r] is the Explain or
// Refusal text of rank r, and members[r] its world rank. `*culprit` receives the world
// rank that refuses or differs, or -1 if all texts are equal because they were cut
// before the difference.
std::string Mismatch(const std::vector<std::string>& texts,
                     const std::vector<int>& members, std::string_view communicator,
                     int* culprit);

}  // namespace ringjax
