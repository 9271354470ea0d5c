// The CUDA driver, opened at run time: a table of its functions, declared here so that
// the build needs no CUDA header. No CUDA library is linked. On a machine without
// libcuda.so.1, OpenDriver returns an error.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace ringjax::cuda {

// Types as in cuda.h. Handles are opaque; some callers pass a stream as an integer.
using Outcome = int;  // CUresult
using Device = int;
using Pointer = unsigned long long;
using Context = struct ContextTag*;
using Stream = struct StreamTag*;
using Event = struct EventTag*;
using Module = struct ModuleTag*;
using Function = struct FunctionTag*;
using HostFunction = void (*)(void*);

// Returns an address of device memory in the driver's type.
inline Pointer ToPointer(const void* p) { return reinterpret_cast<Pointer>(p); }

inline constexpr Outcome kSuccess = 0, kInvalidValue = 1, kNotReady = 600;
// Returns whether the work before an event or in a stream may still run, from the
// result of cuEventQuery or cuStreamQuery. While some thread captures a stream, the
// driver may refuse the query (errors 900 to 908), which says nothing about the work.
// Any other error is final.
inline bool MayRun(Outcome outcome) {
  return outcome == kNotReady || (outcome >= 900 && outcome <= 908);
}
inline constexpr unsigned kEventDisableTiming = 2, kStreamNonBlocking = 1;
inline constexpr int kPointerDevice = 9;  // the attribute is an int
inline constexpr int kAttributeMajor = 75, kAttributeMinor = 76;

// X(member, exported name, parameter types)
#define RINGJAX_CUDA_FUNCTIONS(X)                                                    \
  X(Init, cuInit, (unsigned))                                                        \
  X(DriverGetVersion, cuDriverGetVersion, (int*))                                    \
  X(DeviceGetCount, cuDeviceGetCount, (int*))                                        \
  X(DeviceGet, cuDeviceGet, (Device*, int))                                          \
  X(DeviceGetUuid, cuDeviceGetUuid, (unsigned char*, Device))                        \
  X(DeviceGetAttribute, cuDeviceGetAttribute, (int*, int, Device))                   \
  X(DevicePrimaryCtxRetain, cuDevicePrimaryCtxRetain, (Context*, Device))            \
  X(DevicePrimaryCtxRelease, cuDevicePrimaryCtxRelease_v2, (Device))                 \
  X(CtxGetCurrent, cuCtxGetCurrent, (Context*))                                      \
  X(CtxSetCurrent, cuCtxSetCurrent, (Context))                                       \
  X(CtxGetDevice, cuCtxGetDevice, (Device*))                                         \
  X(PointerGetAttribute, cuPointerGetAttribute, (void*, int, Pointer))               \
  X(ModuleLoadData, cuModuleLoadData, (Module*, const void*))                        \
  X(ModuleUnload, cuModuleUnload, (Module))                                          \
  X(ModuleGetFunction, cuModuleGetFunction, (Function*, Module, const char*))        \
  X(LaunchKernel, cuLaunchKernel,                                                    \
    (Function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, \
     Stream, void**, void**))                                                        \
  X(StreamCreateWithPriority, cuStreamCreateWithPriority, (Stream*, unsigned, int))  \
  X(StreamDestroy, cuStreamDestroy_v2, (Stream))                                     \
  X(StreamQuery, cuStreamQuery, (Stream))                                            \
  X(StreamSynchronize, cuStreamSynchronize, (Stream))                                \
  X(StreamWaitEvent, cuStreamWaitEvent, (Stream, Event, unsigned))                   \
  X(EventCreate, cuEventCreate, (Event*, unsigned))                                  \
  X(EventDestroy, cuEventDestroy_v2, (Event))                                        \
  X(EventRecord, cuEventRecord, (Event, Stream))                                     \
  X(EventQuery, cuEventQuery, (Event))                                               \
  X(MemAllocAsync, cuMemAllocAsync, (Pointer*, size_t, Stream))                      \
  X(MemFreeAsync, cuMemFreeAsync, (Pointer, Stream))                                 \
  X(MemcpyDtoDAsync, cuMemcpyDtoDAsync_v2, (Pointer, Pointer, size_t, Stream))       \
  X(MemcpyHtoDAsync, cuMemcpyHtoDAsync_v2, (Pointer, const void*, size_t, Stream))   \
  X(MemsetD32Async, cuMemsetD32Async, (Pointer, unsigned, size_t, Stream))

// Functions that a driver may lack; the member of a missing function is null.
#define RINGJAX_CUDA_OPTIONAL(X)                                          \
  X(GetErrorName, cuGetErrorName, (Outcome, const char**))                \
  X(GetErrorString, cuGetErrorString, (Outcome, const char**))            \
  X(DeviceGetName, cuDeviceGetName, (char*, int, Device))                 \
  X(CtxGetStreamPriorityRange, cuCtxGetStreamPriorityRange, (int*, int*)) \
  X(EventElapsedTime, cuEventElapsedTime, (float*, Event, Event))         \
  X(FuncLoad, cuFuncLoad, (Function))

struct Driver {
#define RINGJAX_MEMBER(member, name, types) Outcome(*member) types = nullptr;
  RINGJAX_CUDA_FUNCTIONS(RINGJAX_MEMBER)
  RINGJAX_CUDA_OPTIONAL(RINGJAX_MEMBER)
#undef RINGJAX_MEMBER

  // Returns ok, or kInternal with "cuEventRecord: CUDA_ERROR_... (explanation)".
  Status Check(Outcome outcome, std::string_view what) const;
};

// The first call opens and initialises the driver. Later calls return its result.
Result<const Driver*> OpenDriver();

struct DeviceInfo {
  std::string name, uuid;
  int compute_capability = 0;  // 90 for 9.0
};

struct DriverInfo {
  int version = 0;  // 13000 for 13.0
  std::vector<DeviceInfo> devices;
};

Result<DriverInfo> DescribeDriver();

}  // namespace ringjax::cuda

// Returns from the enclosing function unless `driver.function(arguments)` succeeds.
#define RJ_CUDA(driver, function, ...) \
  RJ_TRY((driver).Check((driver).function(__VA_ARGS__), #function))
