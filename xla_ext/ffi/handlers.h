// The handlers as addresses, so that the binding needs no XLA header.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace ringjax {

// Target name and XLA_FFI_Handler*, for jax.ffi.register_ffi_target.
std::vector<std::pair<std::string, void*>> HostHandlers();
// Two more of the host, see check.cc.
std::vector<std::pair<std::string, void*>> CheckHandlers();
// The same names, for the platform "CUDA".
std::vector<std::pair<std::string, void*>> DeviceHandlers();

}  // namespace ringjax
