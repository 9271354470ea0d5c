// The addresses of the FFI handlers, so that the binding needs no XLA header.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace ringjax {

// Target names and XLA_FFI_Handler*, for jax.ffi.register_ffi_target: all of the CPU.
std::vector<std::pair<std::string, void*>> HostHandlers();
// The two handlers of check.cc.
std::vector<std::pair<std::string, void*>> CheckHandlers();
// Handlers for the platform "CUDA"; their target names are also names for the CPU.
std::vector<std::pair<std::string, void*>> DeviceHandlers();

}  // namespace ringjax
