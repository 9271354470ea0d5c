// The PTX of pack.cu: wide accesses to global memory, and conversions from and to f16
// and bf16 that need no CUDA header. cuda_on_cpu.h does the same on the CPU.
#pragma once

namespace ringjax::cuda {

using Address = unsigned long long;

// Addresses arrive as integers, which the compiler would treat as generic pointers. So
// the wide accesses state that the memory is global, and the loads (.nc) that no thread
// writes the memory that they read.
__device__ __forceinline__ void LoadWords(uint4& v, Address at) {
  asm("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
      : "l"(at));
}
__device__ __forceinline__ void LoadWords(uint2& v, Address at) {
  asm("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(at));
}
__device__ __forceinline__ void LoadWords(unsigned int& v, Address at) {
  asm("ld.global.nc.u32 %0, [%1];" : "=r"(v) : "l"(at));
}
__device__ __forceinline__ void StoreWords(Address at, const uint4& v) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}
__device__ __forceinline__ void StoreWords(Address at, const uint2& v) {
  asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(at), "r"(v.x), "r"(v.y)
               : "memory");
}
__device__ __forceinline__ void StoreWords(Address at, unsigned int v) {
  asm volatile("st.global.u32 [%0], %1;" ::"l"(at), "r"(v) : "memory");
}

__device__ __forceinline__ float HalfToFloat(unsigned short h) {
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
  return f;
}
__device__ __forceinline__ unsigned short FloatToHalf(float f) {
  unsigned short h;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
  return h;
}
__device__ __forceinline__ unsigned short DoubleToHalf(double d) {
  unsigned short h;
  asm("cvt.rn.f16.f64 %0, %1;" : "=h"(h) : "d"(d));
  return h;
}
__device__ __forceinline__ float BFloat16ToFloat(unsigned short b) {
  return __uint_as_float(static_cast<unsigned int>(b) << 16);
}
__device__ __forceinline__ unsigned short FloatToBFloat16(float f) {
#if __CUDA_ARCH__ >= 800
  unsigned short b;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(b) : "f"(f));
  return b;
#else
  const unsigned int bits = __float_as_uint(f);
  if (f != f) return static_cast<unsigned short>((bits >> 16) | 0x40u);
  return static_cast<unsigned short>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
#endif
}
// Rounds `d` to a float toward zero and sets the last bit if the float is inexact
// (rounding to odd, see base/convert.h). Rounding that float to bf16 then has the same
// result as rounding `d` directly.
__device__ __forceinline__ unsigned short DoubleToBFloat16(double d) {
  const float cut = __double2float_rz(d);
  const unsigned int inexact = static_cast<double>(cut) != d ? 1u : 0u;
  return FloatToBFloat16(__uint_as_float(__float_as_uint(cut) | inexact));
}

// Returns `v` unchanged, for a store byte by byte. If a 16-bit operand comes from a cvt
// to f16 or bf16, ptxas (seen in 13.0) wrongly computes its low byte by converting the
// number to an integer. ptxas does not do that with one half of a 32-bit word.
__device__ __forceinline__ unsigned short Bits(unsigned short v) {
  unsigned int word;
  asm("mov.b32 %0, {%1, %1};" : "=r"(word) : "h"(v));
  return static_cast<unsigned short>(word);
}

}  // namespace ringjax::cuda
