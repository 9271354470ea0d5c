// Fusion plans: which tensors of a call are packed into one buffer and which stay where
// they are. Pure functions without CUDA; every rank makes the same plan from the same
// call.
//
// In the default mode, hybrid, small tensors are packed, because an NCCL operation for
// each costs more than two copies of few bytes. Large tensors are reduced in place,
// because two copies of many bytes cost more than an operation. Tensors that need
// arithmetic before or after NCCL (a wire dtype, a factor, an average that NCCL would
// round) are packed in every mode, because the arithmetic needs that pass over the data
// anyway.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "engine/call/descriptor.h"

namespace ringjax {

enum class Fusion : uint8_t {
  kHybrid,
  kPack,   // packs all tensors
  kGroup,  // packs no tensor: one NCCL operation per tensor, all in one group
};

// Parses "hybrid", "pack" or "group"; fails with kInvalidArgument for other names.
Result<Fusion> FusionFromName(std::string_view name);

struct FusionOptions {
  Fusion mode = Fusion::kHybrid;
  uint64_t small = 1 << 20;  // bytes; a tensor with fewer bytes is small
  bool can_pack = true;      // false without device code
};

// A packed tensor and its offset in the fused buffer.
struct Packed {
  size_t tensor;      // index in the call
  uint64_t elements;  // counted in the dtype of the segment
  uint64_t offset;    // bytes from the start of the buffer, a multiple of 16
};

// Packed tensors of one dtype and wire dtype, which one NCCL operation moves. The
// operation includes the gaps between the tensors, whose contents are never read.
struct Segment {
  DType dtype, wire;  // complex numbers are pairs of floats here
  uint64_t offset = 0;
  uint64_t bytes = 0;
  std::vector<Packed> pieces;

  uint64_t elements() const { return bytes / Width(wire); }
};

struct FusionPlan {
  std::vector<Segment> segments;
  std::vector<size_t> in_place;  // indices of tensors
  uint64_t bytes = 0;            // size of the fused buffer

  uint64_t packed_bytes() const;
};

// Makes the plan of a call; `size` is the number of ranks. Fails if the call needs
// arithmetic that the kernels do not have.
Result<FusionPlan> PlanFusion(const Call& call, int size, const FusionOptions& options);

// Returns the dtype in which NCCL moves the elements of a tensor.
DType WireType(const Call& call, const Tensor& tensor);

// Returns whether a reduction must convert the elements, for a wire dtype or a factor.
bool Converts(const Call& call, const Tensor& tensor);

// Return the dtype of the arithmetic, and the number of elements in this dtype: a
// complex number is two floats.
DType ComponentType(DType type);
uint64_t Components(const Tensor& tensor);

}  // namespace ringjax
