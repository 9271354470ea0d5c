// Converts f16 and bf16, given as bits, to and from float and double, with rounding to
// nearest even.
//
// The code has no branches and almost only integer operations. Compilers vectorise it
// for every CPU, and the results have the same bits everywhere. A double that becomes a
// denormal of bf16 is first a denormal float, which the thread may flush to zero. So
// callers hold a FloatMode (float_mode.h). Arithmetic on f16 and bf16 is done in float,
// in reduce_kernels.h.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

// Forces inlining: a call in a loop would prevent its vectorisation.
#define RINGJAX_INLINE [[gnu::always_inline]] inline

namespace ringjax {

inline constexpr uint32_t kSignBit = 0x80000000u;
inline constexpr uint32_t kFloatInfinity = 0x7f800000u;

RINGJAX_INLINE float FloatFromBits(uint32_t bits) { return std::bit_cast<float>(bits); }
RINGJAX_INLINE uint32_t BitsOf(float value) { return std::bit_cast<uint32_t>(value); }

RINGJAX_INLINE float BFloat16ToFloat(uint16_t b) {
  return FloatFromBits(static_cast<uint32_t>(b) << 16);
}

RINGJAX_INLINE uint16_t BFloat16FromFloatBits(uint32_t bits) {
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t quiet = (bits >> 16) | 0x40u;
  const bool nan = (bits & ~kSignBit) > kFloatInfinity;
  return static_cast<uint16_t>(nan ? quiet : rounded);
}

RINGJAX_INLINE float HalfToFloat(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  const uint32_t shifted = static_cast<uint32_t>(h & 0x7fffu) << 13;
  const uint32_t normal = shifted + (112u << 23);     // exponent bias 127 instead of 15
  const uint32_t special = shifted | kFloatInfinity;  // infinity and NaN
  // An f16 denormal with mantissa m has the value m 2^-24. Its bits with the exponent
  // -14 are the float 2^-14 + m 2^-24, from which 2^-14 is subtracted exactly.
  const float lifted = FloatFromBits(shifted + (113u << 23));
  const uint32_t denormal = BitsOf(lifted - FloatFromBits(113u << 23));
  const uint32_t finite = shifted < 0x00800000u ? denormal : normal;
  return FloatFromBits(sign | (shifted >= 0x0f800000u ? special : finite));
}

RINGJAX_INLINE uint16_t HalfFromFloatBits(uint32_t bits) {
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & ~kSignBit;
  const uint32_t odd = (magnitude >> 13) & 1u;
  const uint32_t normal = (magnitude - (112u << 23) + 0xfffu + odd) >> 13;
  // The last bit of the float 0.5 has the weight 2^-24, as the last bit of an f16
  // denormal has. So the addition of 0.5 rounds to a multiple of 2^-24.
  const uint32_t capped = magnitude < 0x38800000u ? magnitude : 0u;
  const uint32_t denormal = BitsOf(FloatFromBits(capped) + 0.5f) - 0x3f000000u;
  const uint32_t nan = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
  uint32_t half = magnitude < 0x38800000u ? denormal : normal;
  half = magnitude >= 0x47800000u ? 0x7c00u : half;
  half = magnitude > kFloatInfinity ? nan : half;
  return static_cast<uint16_t>(sign | half);
}

// Rounds to odd: truncates `value` to float, and sets the last bit if the float is
// inexact. Rounding the float to a shorter type then gives the same result as rounding
// `value` to that type directly. Two roundings to nearest might give another result.
// Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", IEEE Trans.
// Comput. 57(4), 2008.
RINGJAX_INLINE uint32_t FloatBitsToOdd(double value) {
  const float nearest = static_cast<float>(value);
  const double back = static_cast<double>(nearest);
  const uint32_t away = std::fabs(back) > std::fabs(value) ? 1u : 0u;
  const uint32_t inexact = back != value ? 1u : 0u;
  return (BitsOf(nearest) - away) | inexact;
}

RINGJAX_INLINE uint16_t FloatToBFloat16(float v) {
  return BFloat16FromFloatBits(BitsOf(v));
}
RINGJAX_INLINE uint16_t FloatToHalf(float v) { return HalfFromFloatBits(BitsOf(v)); }
RINGJAX_INLINE uint16_t DoubleToBFloat16(double v) {
  return BFloat16FromFloatBits(FloatBitsToOdd(v));
}
RINGJAX_INLINE uint16_t DoubleToHalf(double v) {
  return HalfFromFloatBits(FloatBitsToOdd(v));
}

}  // namespace ringjax
