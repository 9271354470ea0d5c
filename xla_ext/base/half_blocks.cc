// See half_blocks.h.
#include "base/half_blocks.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <cstring>

#include "base/status.h"

namespace ringjax {

#if defined(__x86_64__)
namespace {

constexpr size_t kPerVector = 8, kHalfBytes = 2, kFloatBytes = 4;

[[RINGJAX_V3]] void WidenEight(char* floats, const char* halves) {
  const __m128i in = _mm_loadu_si128(reinterpret_cast<const __m128i*>(halves));
  _mm256_storeu_ps(reinterpret_cast<float*>(floats), _mm256_cvtph_ps(in));
}

[[RINGJAX_V3]] void NarrowEight(char* halves, const char* floats) {
  const __m256 in = _mm256_loadu_ps(reinterpret_cast<const float*>(floats));
  const __m128i out = _mm256_cvtps_ph(in, _MM_FROUND_TO_NEAREST_INT);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(halves), out);
}

}  // namespace

[[RINGJAX_V3]] void WidenHalves(void* floats, const void* halves, size_t n) {
  char* out = static_cast<char*>(floats);
  const char* in = static_cast<const char*>(halves);
  size_t i = 0;
  for (; i + kPerVector <= n; i += kPerVector)
    WidenEight(out + i * kFloatBytes, in + i * kHalfBytes);
  if (i == n) return;
  char rest[kPerVector * kHalfBytes] = {}, wide[kPerVector * kFloatBytes];
  std::memcpy(rest, in + i * kHalfBytes, (n - i) * kHalfBytes);
  WidenEight(wide, rest);
  std::memcpy(out + i * kFloatBytes, wide, (n - i) * kFloatBytes);
}

[[RINGJAX_V3]] void NarrowHalves(void* halves, const void* floats, size_t n) {
  char* out = static_cast<char*>(halves);
  const char* in = static_cast<const char*>(floats);
  size_t i = 0;
  for (; i + kPerVector <= n; i += kPerVector)
    NarrowEight(out + i * kHalfBytes, in + i * kFloatBytes);
  if (i == n) return;
  char rest[kPerVector * kFloatBytes] = {}, narrow[kPerVector * kHalfBytes];
  std::memcpy(rest, in + i * kFloatBytes, (n - i) * kFloatBytes);
  NarrowEight(narrow, rest);
  std::memcpy(out + i * kHalfBytes, narrow, (n - i) * kHalfBytes);
}
#else
void WidenHalves(void*, const void*, size_t) { RJ_CHECK(false, "no F16C here"); }
void NarrowHalves(void*, const void*, size_t) { RJ_CHECK(false, "no F16C here"); }
#endif

}  // namespace ringjax
