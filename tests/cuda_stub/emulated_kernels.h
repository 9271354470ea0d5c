// The kernels of pack.cu for the CUDA stub, by name, with the size of their parameters.
// Only one source file may include this header, because it compiles pack.cu.
#pragma once

#include <string_view>

#include "cuda/cuda_on_cpu.h"
#include "cuda_machine.h"

namespace ringjax::stub {

inline Kernel FindKernel(std::string_view name) {
  const cuda::KernelOnCpu found = cuda::FindOnCpu(name);
  if (found == nullptr) return {};
  const bool large = name.ends_with("_" + std::to_string(kPackLarge));
  return {large ? sizeof(PackTable<kPackLarge>) : sizeof(PackTable<kPackSmall>),
          [found](const void* parameters, unsigned grid, unsigned block) {
            cuda::LaunchOnCpu(found, parameters, grid, block);
          }};
}

}  // namespace ringjax::stub
