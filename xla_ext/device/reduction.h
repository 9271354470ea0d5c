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

// Whether NCCL can do all that the call asks for.
Status CheckReductions(const Call& call, int size);

}  // namespace ringjax
