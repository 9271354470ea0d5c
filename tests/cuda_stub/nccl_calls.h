// The common parts of all exported functions of the NCCL stub: the functions of the
// driver that they call, the living communicators, errors and the log.
#pragma once

#include <dlfcn.h>

#include <map>
#include <type_traits>

#include "nccl_comm.h"

namespace ringjax::nccl {

// The functions of the CUDA driver that the NCCL stub needs.
struct CudaCalls {
  cuda::Outcome (*launch)(cuda::Stream, cuda::HostFunction, void*) = nullptr;
  cuda::Outcome (*get_context)(cuda::Context*) = nullptr;
  cuda::Outcome (*set_context)(cuda::Context) = nullptr;
  cuda::Outcome (*get_device)(cuda::Device*) = nullptr;
  cuda::Outcome (*get_uuid)(unsigned char*, cuda::Device) = nullptr;
  unsigned long long (*pushed)(cuda::Stream) = nullptr;  // a function of the stub only
  bool found = false;

  CudaCalls() {
    void* library = dlopen("libcuda.so.1", RTLD_NOW);
    if (library == nullptr) return;
    const auto find = [&](auto& function, const char* name) {
      function =
          reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
      return function != nullptr;
    };
    found = find(launch, "cuLaunchHostFunc") & find(get_context, "cuCtxGetCurrent") &
            find(set_context, "cuCtxSetCurrent") & find(get_device, "cuCtxGetDevice") &
            find(get_uuid, "cuDeviceGetUuid") & find(pushed, "stub_cuda_pushed");
  }
};

inline const CudaCalls& Cuda() {
  static const CudaCalls& calls = *new CudaCalls;
  return calls;
}

inline std::mutex& g_mutex = *new std::mutex;
inline auto& g_comms = *new std::map<Comm, CommPointer>;
inline std::string& g_last_error = *new std::string;

inline Outcome Fail(Outcome outcome, const std::string& why) {
  std::lock_guard lock(g_mutex);
  g_last_error = why;
  return outcome;
}

inline CommPointer Find(Comm comm) {
  std::lock_guard lock(g_mutex);
  const auto found = g_comms.find(comm);
  return found == g_comms.end() ? nullptr : found->second;
}

// Returns whether this call must fail because of NCCL_STUB_FAIL.
inline bool Strikes(const char* function) { return g_knobs.failures.Strikes(function); }

#define STUB_ENTER()                                                                 \
  do {                                                                               \
    if (Strikes(__func__))                                                           \
      return Fail(kSystemError, std::string(__func__) + " fails by NCCL_STUB_FAIL"); \
  } while (0)

// Checks NCCL's rule that a caller sees the last call succeed before the next call.
inline Outcome Ready(CommTag& comm) {
  std::string why;
  Outcome state;
  {
    std::lock_guard lock(comm.mutex);
    state = comm.aborted ? kInvalidUsage : comm.state;
    why = comm.error;
  }
  if (state == kInProgress)
    return Fail(kInvalidArgument,
                "the communicator is used before its last call is done: poll "
                "ncclCommGetAsyncError");
  return state == kSuccess ? kSuccess : Fail(state, why);
}

// Returns the number of groups that this thread has opened and not closed.
int GroupDepth();

#define STUB_DECLARE(member, name, types) STUB_EXPORT Outcome name types;
RINGJAX_NCCL_FUNCTIONS(STUB_DECLARE)
STUB_EXPORT const char* ncclGetErrorString(Outcome outcome);
STUB_EXPORT const char* ncclGetLastError(Comm comm);

}  // namespace ringjax::nccl
