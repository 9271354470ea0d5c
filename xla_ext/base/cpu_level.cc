// See cpu_level.h. The x86-64 psABI defines the levels. The bit indices are from the
// manuals of Intel and AMD.
#include "base/cpu_level.h"

#if defined(__x86_64__)
#include <cpuid.h>

#include <cstdint>
#include <initializer_list>
#endif

namespace ringjax {
#if defined(__x86_64__)
namespace {

struct Leaf {
  uint32_t a = 0, b = 0, c = 0, d = 0;
};

Leaf QueryCpuid(uint32_t number) {
  Leaf leaf;
  if (!__get_cpuid_count(number, 0, &leaf.a, &leaf.b, &leaf.c, &leaf.d)) return {};
  return leaf;
}

bool All(uint32_t found, std::initializer_list<int> bits) {
  for (int bit : bits)
    if ((found >> bit & 1) == 0) return false;
  return true;
}

// Returns which registers the system saves when it switches threads: bit 1 is for xmm,
// bit 2 for ymm, bits 5 to 7 for AVX-512. The CPU must have xgetbv (flag osxsave).
uint64_t SavedRegisters() {
  uint32_t low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return static_cast<uint64_t>(high) << 32 | low;
}

}  // namespace

CpuLevel DetectedLevel() {
  const Leaf one = QueryCpuid(1), seven = QueryCpuid(7),
             extended = QueryCpuid(0x80000001);
  // ssse3, fma, cmpxchg16b, sse4.1, sse4.2, movbe, popcnt, osxsave, avx, f16c.
  if (!All(one.c, {9, 12, 13, 19, 20, 22, 23, 27, 28, 29})) return CpuLevel::kBase;
  const bool v3 = All(seven.b, {3, 5, 8}) &&  // bmi1, avx2, bmi2
                  All(extended.c, {0, 5});    // lahf, lzcnt
  const uint64_t saved = SavedRegisters();
  if (!v3 || (saved & 0x6) != 0x6) return CpuLevel::kBase;
  const bool v4 = All(seven.b, {16, 17, 28, 30, 31});  // avx512 f, dq, cd, bw, vl
  return v4 && (saved & 0xe6) == 0xe6 ? CpuLevel::kV4 : CpuLevel::kV3;
}
#else
CpuLevel DetectedLevel() { return CpuLevel::kBase; }
#endif
}  // namespace ringjax
