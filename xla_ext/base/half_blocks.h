// Converts f16 to and from f32 with the CPU's own instructions (F16C, which x86-64-v3
// has). These instructions are three times as fast as the vectorised integer code of
// convert.h and give the same bits, except that a signaling NaN of f16 becomes a quiet
// one. The functions accept any alignment. NarrowHalves rounds to nearest even.
#pragma once

#include <cstddef>

#include "base/cpu_level.h"

namespace ringjax {

// Whether WidenHalves and NarrowHalves may be called on this CPU.
#if defined(__x86_64__)
inline bool ConvertsHalves() { return Level() >= CpuLevel::kV3; }
#else
inline bool ConvertsHalves() { return false; }
#endif

void WidenHalves(void* floats, const void* halves, size_t n);
void NarrowHalves(void* halves, const void* floats, size_t n);

}  // namespace ringjax
