// See fusion.h.
#include "device/fusion.h"

#include <algorithm>

#include "device/kernels.h"
#include "device/reduction.h"

namespace ringjax {
namespace {

constexpr uint64_t kAlignment = 16;  // bytes, for vector loads in the fused buffer

uint64_t Aligned(uint64_t bytes) {
  return (bytes + kAlignment - 1) & ~(kAlignment - 1);
}

bool Scales(const Call& call) { return call.prescale != 1.0 || call.postscale != 1.0; }

bool Averages(const Call& call, const Tensor& t, int size) {
  return call.op == Collective::kAllreduce &&
         AveragesLast(call, WireType(call, t), size);
}

bool Packs(const Call& call, const Tensor& t, int size, const FusionOptions& options) {
  if (Converts(call, t)) return true;
  if (!options.can_pack) return false;
  if (Averages(call, t, size)) return true;
  switch (options.mode) {
    case Fusion::kPack:
      return true;
    case Fusion::kGroup:
      return false;
    case Fusion::kHybrid:
      break;
  }
  // One rank sends nothing, so packing would only add copies.
  return size > 1 && t.bytes() < options.small;
}

// Returns a segment for each pair of dtype and wire dtype among the chosen tensors, in
// the order in which the pairs first appear.
std::vector<Segment> Collect(const Call& call, const std::vector<size_t>& chosen) {
  std::vector<Segment> segments;
  for (size_t i : chosen) {
    const Tensor& t = call.tensors[i];
    const DType dtype = ComponentType(t.dtype), wire = WireType(call, t);
    auto found = std::find_if(segments.begin(), segments.end(), [&](const Segment& s) {
      return s.dtype == dtype && s.wire == wire;
    });
    if (found == segments.end())
      found = segments.insert(segments.end(), Segment{dtype, wire, 0, 0, {}});
    found->pieces.push_back({i, Components(t), 0});
  }
  return segments;
}

}  // namespace

Result<Fusion> FusionFromName(std::string_view name) {
  if (name == "hybrid") return Fusion::kHybrid;
  if (name == "pack") return Fusion::kPack;
  if (name == "group") return Fusion::kGroup;
  return Status(Code::kInvalidArgument, "fusion is '" + std::string(name) +
                                            "': expected hybrid, pack or group");
}

DType ComponentType(DType type) {
  if (type == DType::kC64) return DType::kF32;
  return type == DType::kC128 ? DType::kF64 : type;
}

uint64_t Components(const Tensor& tensor) {
  return tensor.elements() * (IsComplex(tensor.dtype) ? 2 : 1);
}

DType WireType(const Call& call, const Tensor& tensor) {
  if (call.wire >= 0 && (tensor.dtype == DType::kF32 || tensor.dtype == DType::kF64))
    return static_cast<DType>(call.wire);
  return ComponentType(tensor.dtype);
}

bool Converts(const Call& call, const Tensor& tensor) {
  const bool reduces =
      call.op == Collective::kAllreduce || call.op == Collective::kReducescatter;
  return reduces &&
         (Scales(call) || WireType(call, tensor) != ComponentType(tensor.dtype));
}

uint64_t FusionPlan::packed_bytes() const {
  uint64_t sum = 0;
  for (const Segment& s : segments)
    for (const Packed& p : s.pieces) sum += p.elements * Width(s.dtype);
  return sum;
}

Result<FusionPlan> PlanFusion(const Call& call, int size,
                              const FusionOptions& options) {
  FusionPlan plan;
  std::vector<size_t> chosen;
  for (size_t i = 0; i < call.tensors.size(); ++i) {
    const Tensor& t = call.tensors[i];
    if (t.bytes() == 0) continue;
    if (!Packs(call, t, size, options)) {
      plan.in_place.push_back(i);
      continue;
    }
    if (Converts(call, t) && !options.can_pack)
      return Status(Code::kFailedPrecondition,
                    "compression and scaling need device code, and this ringjax was "
                    "built without a compiler for it; see ringjax.build_info()");
    if (Converts(call, t) && !cuda::HasArithmetic(ComponentType(t.dtype)))
      return Status(Code::kInvalidArgument,
                    "prescale_factor and postscale_factor do not work on " +
                        std::string(Name(t.dtype)) + " on CUDA devices");
    chosen.push_back(i);
  }
  for (Segment& s : Collect(call, chosen)) {
    const bool alone = s.pieces.size() == 1 && options.mode == Fusion::kHybrid;
    const Tensor& first = call.tensors[s.pieces[0].tensor];
    if (alone && !Converts(call, first) && !Averages(call, first, size)) {
      // A single tensor has nothing to be fused with.
      plan.in_place.push_back(s.pieces[0].tensor);
      continue;
    }
    s.offset = plan.bytes;
    for (Packed& p : s.pieces) {
      p.offset = plan.bytes;
      plan.bytes += Aligned(p.elements * Width(s.wire));
    }
    s.bytes = plan.bytes - s.offset;
    plan.segments.push_back(std::move(s));
  }
  return plan;
}

}  // namespace ringjax
