// Element types and reduce operations: their codes, names and widths in bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace ringjax {

// The codes are sent between ranks and through FFI attributes: append new types, and
// never change the order.
enum class DType : uint8_t {
  kBool = 0,
  kI8,
  kI16,
  kI32,
  kI64,
  kU8,
  kU16,
  kU32,
  kU64,
  kF16,
  kBF16,
  kF32,
  kF64,
  kC64,
  kC128,
};
inline constexpr int kDTypeCount = 15;

// The codes are those of Horovod.
enum class ReduceOp : uint8_t {
  kAverage = 0,
  kSum = 1,
  kAdasum = 2,
  kMin = 3,
  kMax = 4,
  kProduct = 5,
};

inline constexpr size_t kWidths[kDTypeCount] = {1, 1, 2, 4, 8, 1, 2, 4,
                                                8, 2, 2, 4, 8, 8, 16};
inline constexpr std::string_view kDTypeNames[kDTypeCount] = {
    "bool", "i8",  "i16",  "i32", "i64", "u8",  "u16", "u32",
    "u64",  "f16", "bf16", "f32", "f64", "c64", "c128"};
inline constexpr std::string_view kReduceOpNames[6] = {"AVERAGE", "SUM", "ADASUM",
                                                       "MIN",     "MAX", "PRODUCT"};

constexpr size_t Width(DType t) { return kWidths[static_cast<int>(t)]; }
constexpr std::string_view Name(DType t) { return kDTypeNames[static_cast<int>(t)]; }
constexpr std::string_view Name(ReduceOp op) {
  return kReduceOpNames[static_cast<int>(op)];
}
constexpr bool IsFloat(DType t) { return t >= DType::kF16 && t <= DType::kF64; }
constexpr bool IsComplex(DType t) { return t >= DType::kC64; }

}  // namespace ringjax
