// pack.cu compiled for the CPU: the parts of CUDA that the kernels need, and a launcher
// that finds a kernel by name and runs the threads of all blocks one after another. One
// source file of the native tests includes this file, and one of the tests' stub of
// libcuda.
//
// Not a CUDA emulator: it has no shared memory, no synchronisation and no warps, which
// pack.cu does not use either. It reveals wrong indices, offsets and bits, but neither
// races nor speed.
#pragma once

#include <cstdint>
#include <cstring>
#include <string_view>

#include "base/convert.h"
#include "base/status.h"

#define __device__
#define __forceinline__ inline

namespace ringjax::cuda {

using Address = unsigned long long;

struct Index {
  unsigned int x = 0;
};
inline thread_local Index threadIdx, blockIdx, gridDim;

struct uint2 {
  unsigned int x, y;
};
struct uint4 {
  unsigned int x, y, z, w;
};

// On the device, a wide access faults unless the address is a multiple of the size, so
// the address is checked here.
template <typename Words>
void LoadWords(Words& words, Address at) {
  RJ_CHECK(at % sizeof(Words) == 0, "a wide access is not aligned");
  std::memcpy(&words, reinterpret_cast<const void*>(at), sizeof(Words));
}
template <typename Words>
void StoreWords(Address at, const Words& words) {
  RJ_CHECK(at % sizeof(Words) == 0, "a wide access is not aligned");
  std::memcpy(reinterpret_cast<void*>(at), &words, sizeof(Words));
}

inline float __uint_as_float(unsigned int bits) { return FloatFromBits(bits); }

}  // namespace ringjax::cuda

#include "cuda/pack.cu"

#undef __device__
#undef __forceinline__

namespace ringjax::cuda {

// One thread of a kernel of pack.cu. `table` is the parameter of the launch.
using KernelOnCpu = void (*)(const void* table);

// Returns the kernel named `name`, or null if pack.cu has no such kernel.
inline KernelOnCpu FindOnCpu(std::string_view name) {
#define RINGJAX_FIND(kernel, function, T, W, N)                 \
  if (name == #kernel)                                          \
    return [](const void* table) {                              \
      function<T, W>(*static_cast<const PackTable<N>*>(table)); \
    };
  RINGJAX_KERNELS(RINGJAX_FIND)
#undef RINGJAX_FIND
  return nullptr;
}

inline void LaunchOnCpu(KernelOnCpu kernel, const void* table, unsigned int blocks,
                        unsigned int threads) {
  gridDim.x = blocks;
  for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
    for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) kernel(table);
}

}  // namespace ringjax::cuda
