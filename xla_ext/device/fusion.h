// Which tensors of a call travel packed into one buffer and which where they are: a
// pure plan, no CUDA in it. Every rank makes the same one from the same call.
//
// Hybrid, the default: small tensors are packed, because an operation on each costs
// more than two copies of few bytes; large ones are reduced in place, because two
// copies of many bytes cost more than an operation. What needs arithmetic on the way (a
// wire type, a factor, an average that NCCL would round) is packed in every mode: the
// pass is needed anyway.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "engine/call/descriptor.h"

namespace ringjax {

enum class Fusion : uint8_t {
  kHybrid,
  kPack,   // everything into the buffer
  kGroup,  // nothing: one operation per tensor, all in one group
};

// "hybrid", "pack" or "group".
Result<Fusion> FusionFromName(std::string_view name);

struct FusionOptions {
  Fusion mode = Fusion::kHybrid;
  uint64_t small = 1 << 20;  // bytes; a tensor below is small
  bool can_pack = true;      // false without device code
};

// A tensor, or the part of it that one kernel entry covers, and its place in the
// buffer.
struct Packed {
  size_t tensor;
  uint64_t elements;  // of `dtype` of its segment
  uint64_t offset;    // bytes from the start of the buffer, a multiple of 16
};

// Tensors of one type, one operation on `elements` of `wire` at `offset`. Gaps between
// tensors take part: their content is never read.
struct Segment {
  DType dtype, wire;  // complex numbers are pairs of floats here
  uint64_t offset = 0;
  uint64_t bytes = 0;
  std::vector<Packed> pieces;

  uint64_t elements() const { return bytes / Width(wire); }
};

struct FusionPlan {
  std::vector<Segment> segments;
  std::vector<size_t> in_place;  // tensors
  uint64_t bytes = 0;            // of the buffer

  uint64_t packed_bytes() const;
};

// `call` is an allreduce, broadcast or reducescatter; `size` the number of ranks.
// Errors if something would have to be computed that the kernels cannot.
Result<FusionPlan> PlanFusion(const Call& call, int size, const FusionOptions& options);

// What the elements of a tensor travel as in a reduction.
DType WireType(const Call& call, const Tensor& tensor);

// Whether elements change on the way: a wire type applies, or a factor.
bool Converts(const Call& call, const Tensor& tensor);

// How elements are computed with: a complex number is two floats.
DType ComponentType(DType type);
uint64_t Components(const Tensor& tensor);

}  // namespace ringjax
