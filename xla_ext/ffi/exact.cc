// The FFI handler ExactAdd, for the CPU: adds the leaves of a tree to an accumulator
// (ringjax/exact/native_add.py). It needs no communicator.
//
// Operands: the accumulator's words, counts, largest magnitudes and checksum, then the
// units of the leaves, then the leaves. The results are the accumulator, in the memory
// of the operands.
#include <cstring>
#include <optional>
#include <string>

#include "exact/fixed_point.h"
#include "ffi/handlers.h"
#include "ffi/invocation.h"

namespace ringjax {
namespace {

constexpr size_t kParts = 4;  // the operands of an accumulator

std::optional<DType> FloatType(ffi::DataType type) {
  switch (type) {
    case ffi::DataType::F16:
      return DType::kF16;
    case ffi::DataType::BF16:
      return DType::kBF16;
    case ffi::DataType::F32:
      return DType::kF32;
    case ffi::DataType::F64:
      return DType::kF64;
    default:
      return std::nullopt;
  }
}

ffi::Error Unreadable() {
  return ffi::Error(ffi::ErrorCode::kInvalidArgument,
                    "ringjax.exact_add: an operand is unreadable");
}

ffi::Error ExactAdd(ffi::RemainingArgs args, ffi::RemainingRets rets, int64_t width) {
  void* parts[kParts] = {};
  for (size_t i = 0; i < kParts; ++i) {
    const auto in = args.get<ffi::AnyBuffer>(i);
    auto out = rets.get<ffi::AnyBuffer>(i);
    if (!in.has_value() || !out.has_value()) return Unreadable();
    parts[i] = (*out)->untyped_data();
    if (parts[i] != in->untyped_data() && in->size_bytes() > 0)
      std::memcpy(parts[i], in->untyped_data(), in->size_bytes());
  }
  const exact::Accumulator to{
      static_cast<int64_t*>(parts[0]), static_cast<int32_t (*)[2]>(parts[1]),
      static_cast<float*>(parts[2]), static_cast<exact::Checksum*>(parts[3])};
  const auto units = args.get<ffi::Buffer<ffi::S32>>(kParts);
  if (!units.has_value() || args.size() != kParts + 1 + units->element_count())
    return Unreadable();
  uint64_t first = 0;
  for (size_t i = 0; i < units->element_count(); ++i) {
    const auto leaf = args.get<ffi::AnyBuffer>(kParts + 1 + i);
    if (!leaf.has_value()) return Unreadable();
    const auto dtype = FloatType(leaf->element_type());
    if (!dtype) return Unreadable();
    exact::AddLeaf(leaf->untyped_data(), *dtype, leaf->element_count(), i,
                   units->typed_data()[i], static_cast<int>(width), first, to);
    first += leaf->element_count();
  }
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(
    kExactAdd, ExactAdd,
    ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attr<int64_t>("width"));

}  // namespace

std::vector<std::pair<std::string, void*>> ExactHandlers() {
  return {{"ringjax_exact_add", reinterpret_cast<void*>(kExactAdd)}};
}

}  // namespace ringjax
