// f16 to and from f32 by the CPU's own instructions (F16C, which x86-64-v3 has): three
// times as fast as the integer code of convert.h that compilers make vectors of, with
// the same bits. Any alignment.
#pragma once

#include <cstddef>

#include "base/cpu_level.h"

namespace ringjax {

// Whether the two functions may be called.
#if defined(__x86_64__)
inline bool ConvertsHalves() { return Level() >= CpuLevel::kV3; }
#else
inline bool ConvertsHalves() { return false; }
#endif

void WidenHalves(void* floats, const void* halves, size_t n);
void NarrowHalves(void* halves, const void* floats, size_t n);  // to nearest even

}  // namespace ringjax
