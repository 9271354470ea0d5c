// See copy.h.
#include "transport/copy.h"

#include <cstdint>
#include <cstring>

#include "base/clones.h"

namespace ringjax {
namespace {

// Shorter copies are quick in the C library, and sanitizers look into memcpy.
#if defined(RINGJAX_SANITIZED)
constexpr size_t kShort = SIZE_MAX;
#else
constexpr size_t kShort = 4096;
#endif
constexpr size_t kStride = 128;

using Vector [[gnu::vector_size(32), gnu::aligned(1), gnu::may_alias]] = char;

// Returns how much it copied: all but a rest below kStride. Four loads before four
// stores, also so that compilers do not take the loop for memcpy and call it.
RINGJAX_CLONES size_t CopyStrides(char* to, const char* from, size_t bytes) {
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
  const size_t done = bytes < kShort ? 0 : CopyStrides(out, in, bytes);
  std::memcpy(out + done, in + done, bytes - done);
}

}  // namespace ringjax
