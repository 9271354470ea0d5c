// The addresses of the FFI handlers, so that the binding needs no XLA header.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace ringjax {

// Returns the name and the XLA_FFI_Handler* of each handler for the CPU, as
// jax.ffi.register_ffi_target needs them.
std::vector<std::pair<std::string, void*>> HostHandlers();
// Return the handlers of check.cc and exact.cc. HostHandlers returns them, too.
std::vector<std::pair<std::string, void*>> CheckHandlers();
std::vector<std::pair<std::string, void*>> ExactHandlers();
// Returns all handlers for CUDA; their names are also the names of handlers for the
// CPU.
std::vector<std::pair<std::string, void*>> DeviceHandlers();

}  // namespace ringjax
