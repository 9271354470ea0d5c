// See copy.h.
#include "transport/copy.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "base/convert.h"
#include "base/cpu_level.h"

namespace ringjax {
namespace {

// Copies of fewer bytes use memcpy, which is fast for short copies. With sanitizers all
// copies use memcpy, because sanitizers check its arguments.
#if defined(RINGJAX_SANITIZED)
constexpr size_t kShort = SIZE_MAX;
#else
constexpr size_t kShort = 4096;
#endif
constexpr size_t kStride = 128;

using Vector [[gnu::vector_size(32), gnu::aligned(1), gnu::may_alias]] = char;

// Copies whole strides, and returns the number of bytes copied. The remainder is
// shorter than kStride. The four loads come before the four stores, so that compilers
// do not recognise the loop as memcpy and replace it by a call.
RINGJAX_INLINE size_t CopyStrides(char* to, const char* from, size_t bytes) {
  size_t done = 0;
  for (; done + kStride <= bytes; done += kStride) {
    const Vector* in = reinterpret_cast<const Vector*>(from + done);
    Vector* out = reinterpret_cast<Vector*>(to + done);
    const Vector a = in[0], b = in[1], c = in[2], d = in[3];
    out[0] = a;
    out[1] = b;
    out[2] = c;
    out[3] = d;
  }
  return done;
}

}  // namespace

void CopyBytes(void* to, const void* from, size_t bytes) {
  char* out = static_cast<char*>(to);
  const char* in = static_cast<const char*>(from);
  const size_t done = bytes < kShort ? 0 : ByLevel<CopyStrides>(out, in, bytes);
  std::memcpy(out + done, in + done, bytes - done);
}

void CopyNonTemporal(void* to, const void* from, size_t bytes) {
#if defined(__SSE2__) && !defined(RINGJAX_SANITIZED)
  constexpr size_t kLine = 64;
  char* out = static_cast<char*>(to);
  const char* in = static_cast<const char*>(from);
  const size_t head = std::min(bytes, -reinterpret_cast<uintptr_t>(out) % kLine);
  std::memcpy(out, in, head);
  size_t done = head;
  for (; done + kLine <= bytes; done += kLine) {
    const auto* source = reinterpret_cast<const __m128i*>(in + done);
    auto* line = reinterpret_cast<__m128i*>(out + done);
    const __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
    const __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
    _mm_stream_si128(line, a);
    _mm_stream_si128(line + 1, b);
    _mm_stream_si128(line + 2, c);
    _mm_stream_si128(line + 3, d);
  }
  std::memcpy(out + done, in + done, bytes - done);
  // Non-temporal stores are weakly ordered: without the fence, a later release store
  // that publishes the copy could become visible before the bytes.
  _mm_sfence();
#else
  CopyBytes(to, from, bytes);
#endif
}

}  // namespace ringjax
