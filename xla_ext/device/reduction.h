// Maps element types and reduce operations to those of NCCL, without any NCCL call.
#pragma once

#include "device/nccl.h"
#include "engine/call/descriptor.h"

namespace ringjax {

struct Reduction {
  nccl::DataType type;
  nccl::RedOp op;
};

// Returns how NCCL reduces elements of `type` that travel as `wire` between `size`
// ranks. Fails with kInvalidArgument if NCCL cannot reduce them. A complex number is a
// pair of floats, so its product is refused. Bool is 0 or 1, so maximum is OR and
// minimum is AND.
Result<Reduction> ReductionOf(DType type, DType wire, ReduceOp op, int size);

// Returns whether NCCL only sums, and the kernels compute the average in float32. NCCL
// averages by multiplying each operand by 1/size, rounded to the type: with 3 ranks a
// bf16 average is wrong by 0.2 %, always in the same direction. So 16-bit types use
// NCCL's average only if `size` is a power of two, where 1/size is exact.
bool AveragesLast(const Call& call, DType wire, int size);

// For elements that pass through the kernels: the factors before and after NCCL's
// reduction, and the operation of that reduction. Averages in float16 are scaled so
// that the sum is in range if the result is.
struct Factors {
  double before, after;
  ReduceOp op;
};
Factors FactorsOf(const Call& call, DType wire, int size);

// Returns ok if NCCL has the reductions that the call needs.
Status CheckReductions(const Call& call, int size);

}  // namespace ringjax
