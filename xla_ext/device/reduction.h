// What NCCL can reduce, in its own terms: element types and operations. No calls here.
#pragma once

#include "device/nccl.h"
#include "engine/call/descriptor.h"

namespace ringjax {

struct Reduction {
  nccl::DataType type;
  nccl::RedOp op;
};

// How NCCL reduces elements of `type` that travel as `wire` between `size` ranks.
// Complex numbers are pairs, so they have sums only; bool is or-ed and and-ed as 0
// and 1.
Result<Reduction> ReductionOf(DType type, DType wire, ReduceOp op, int size);

// NCCL averages by scaling what goes into the sum by 1/size, rounded to the type: 0.2 %
// off in bf16 with 3 ranks, and always the same way. Where that is not exact, sums of
// 16 bits are scaled in float32 by the kernels instead.
bool AveragesLast(const Call& call, DType wire, int size);

// What a call's elements are multiplied by before and after NCCL reduces them, and what
// that reduction is, if they pass through the kernels. An average stays in the range of
// float16 on its way if its result does.
struct Factors {
  double before, after;
  ReduceOp op;
};
Factors FactorsOf(const Call& call, DType wire, int size);

// Whether NCCL can do all that the call asks for.
Status CheckReductions(const Call& call, int size);

}  // namespace ringjax
