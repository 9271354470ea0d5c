// Requests: the groups of tensors of a call that move together.
//
// An allreduce has one request for all tensors of one element type, and a broadcast has
// one request for the bytes of all tensors. In the other collectives each tensor has a
// block for each rank, so each tensor is a request of its own. Requests refer to the
// tensors by spans, so no data are copied.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/reduce.h"
#include "base/short_vector.h"
#include "base/status.h"
#include "collective/schedule.h"
#include "engine/call/descriptor.h"
#include "engine/call/executor.h"

namespace ringjax {

// The tensors of a call that move together, with one plan.
struct Request {
  Collective op = Collective::kAllreduce;  // the collective of the call
  Problem problem;
  Arithmetic arithmetic;
  Buffers buffers;
  Spans in, out;
  std::vector<uint64_t> sizes;  // elements of each tensor, for Adasum
  uint64_t bytes = 0;

  // Returns the bytes that one rank contributes to a reduction, in the wire dtype.
  uint64_t wire_bytes() const {
    return in.bytes() / Width(arithmetic.dtype) * Width(arithmetic.wire);
  }
};
using Requests = ShortVector<Request, 1>;

// Checks that rank `rank` of `size` can do its part of the call: the rows, the root and
// the element types. Fails with kInvalidArgument, or with kFailedPrecondition if the
// call was compiled for another number of ranks.
Status CheckCall(const Call& call, int rank, int size);

// Returns the requests of a call that CheckCall accepts. Empty tensors have no request.
Requests Split(const Call& call, int rank, int size);

// Returns the part of call.rows that belongs to tensor `i`.
inline std::span<const int64_t> RowsOf(const Call& call, size_t i, size_t per_tensor) {
  return std::span(call.rows).subspan(i * per_tensor, per_tensor);
}

}  // namespace ringjax
