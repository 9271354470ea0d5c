// See reduction.h.
#include "device/reduction.h"

#include <bit>

#include "device/fusion.h"

namespace ringjax {
namespace {

constexpr int kNone = -1;
// The NCCL type for each DType; for complex numbers, that of the real part.
constexpr int kNcclTypes[kDTypeCount] = {
    nccl::kUint8,    nccl::kInt8,    kNone,          nccl::kInt32,   nccl::kInt64,
    nccl::kUint8,    kNone,          nccl::kUint32,  nccl::kUint64,  nccl::kFloat16,
    nccl::kBfloat16, nccl::kFloat32, nccl::kFloat64, nccl::kFloat32, nccl::kFloat64};

}  // namespace

Result<Reduction> ReductionOf(DType type, DType wire, ReduceOp op, int size) {
  const int number = kNcclTypes[static_cast<int>(wire)];
  if (number == kNone)
    return Status(Code::kInvalidArgument,
                  "NCCL has no reduction of " + std::string(Name(type)));
  const auto as = static_cast<nccl::DataType>(number);
  const bool is_or = op == ReduceOp::kSum || op == ReduceOp::kMax;
  if (type == DType::kBool) return Reduction{as, is_or ? nccl::kMax : nccl::kMin};
  switch (op) {
    case ReduceOp::kAverage:
      // NCCL's average multiplies each operand by 1/size, which one rank can omit.
      return Reduction{as, size > 1 ? nccl::kAvg : nccl::kSum};
    case ReduceOp::kSum:
      return Reduction{as, nccl::kSum};
    case ReduceOp::kMin:
      return Reduction{as, nccl::kMin};
    case ReduceOp::kMax:
      return Reduction{as, nccl::kMax};
    case ReduceOp::kProduct:
      if (!IsComplex(type)) return Reduction{as, nccl::kProd};
      return Status(Code::kInvalidArgument,
                    "NCCL has no PRODUCT of " + std::string(Name(type)));
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
