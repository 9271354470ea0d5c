// See reduction.h.
#include "device/reduction.h"

#include <bit>

#include "device/fusion.h"

namespace ringjax {
namespace {

bool ToNccl(DType type, nccl::DataType* out) {
  switch (type) {
    case DType::kI8:
      *out = nccl::kInt8;
      return true;
    case DType::kBool:
    case DType::kU8:
      *out = nccl::kUint8;
      return true;
    case DType::kI32:
      *out = nccl::kInt32;
      return true;
    case DType::kU32:
      *out = nccl::kUint32;
      return true;
    case DType::kI64:
      *out = nccl::kInt64;
      return true;
    case DType::kU64:
      *out = nccl::kUint64;
      return true;
    case DType::kF16:
      *out = nccl::kFloat16;
      return true;
    case DType::kBF16:
      *out = nccl::kBfloat16;
      return true;
    case DType::kF32:
    case DType::kC64:
      *out = nccl::kFloat32;
      return true;
    case DType::kF64:
    case DType::kC128:
      *out = nccl::kFloat64;
      return true;
    case DType::kI16:
    case DType::kU16:
      break;
  }
  return false;
}

}  // namespace

Result<Reduction> ReductionOf(DType type, DType wire, ReduceOp op, int size) {
  Reduction r;
  if (!ToNccl(wire, &r.type))
    return Status(Code::kInvalidArgument,
                  "NCCL has no reduction of " + std::string(Name(type)));
  const bool is_or = op == ReduceOp::kSum || op == ReduceOp::kMax;
  if (type == DType::kBool) {
    r.op = is_or ? nccl::kMax : nccl::kMin;
    return r;
  }
  switch (op) {
    case ReduceOp::kAverage:
      // NCCL's average multiplies each operand by 1/size, which one rank can omit.
      r.op = size > 1 ? nccl::kAvg : nccl::kSum;
      return r;
    case ReduceOp::kSum:
      r.op = nccl::kSum;
      return r;
    case ReduceOp::kMin:
      r.op = nccl::kMin;
      return r;
    case ReduceOp::kMax:
      r.op = nccl::kMax;
      return r;
    case ReduceOp::kProduct:
      if (IsComplex(type))
        return Status(Code::kInvalidArgument,
                      "NCCL has no PRODUCT of " + std::string(Name(type)));
      r.op = nccl::kProd;
      return r;
    case ReduceOp::kAdasum:
      break;
  }
  return Status(Code::kInvalidArgument, "op=ADASUM is not a reduction of NCCL");
}

bool AveragesLast(const Call& call, DType wire, int size) {
  return call.reduce_op == ReduceOp::kAverage &&
         (wire == DType::kF16 || wire == DType::kBF16) &&
         !std::has_single_bit(static_cast<unsigned>(size));
}

Factors FactorsOf(const Call& call, DType wire, int size) {
  Factors f{call.prescale, call.postscale, call.reduce_op};
  if (!AveragesLast(call, wire, size)) return f;
  // Divide by a power of two before the sum, so that the sum stays in the range of
  // float16. The division rounds only values that become subnormal.
  const double room =
      wire == DType::kF16 ? std::bit_ceil(static_cast<unsigned>(size)) : 1.0;
  return {f.before / room, f.after * room / size, ReduceOp::kSum};
}

Status CheckReductions(const Call& call, int size) {
  if (call.op != Collective::kAllreduce && call.op != Collective::kReducescatter)
    return OkStatus();
  for (const Tensor& t : call.tensors)
    RJ_TRY(ReductionOf(t.dtype, WireType(call, t), call.reduce_op, size).status());
  return OkStatus();
}

}  // namespace ringjax
