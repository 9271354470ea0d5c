// The state of the CUDA stub: contexts and all living handles. Also the checks at the
// beginning of each function. The functions are defined in libcuda_stub.cc (devices,
// modules, launches) and cuda_queues.cc (streams, events, memory).
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>

#include "cuda_stream.h"

namespace ringjax::stub {

struct Kernel {
  size_t parameter_bytes = 0;
  std::function<void(const void* parameters, unsigned grid, unsigned block)> run;
};

}  // namespace ringjax::stub

namespace ringjax::cuda {

enum : Outcome {
  kOutOfMemory = 2,
  kNotInitialized = 3,
  kInvalidDevice = 101,
  kInvalidContext = 201,
  kInvalidHandle = 400,
  kNotFound = 500,
  kNotPermitted = 800,
  kUnknown = 999,
};

struct FunctionTag {
  Module module;
  stub::Kernel kernel;
  std::string name;
};

struct ModuleTag {
  Context context;
  std::map<std::string, std::unique_ptr<FunctionTag>> functions;
};

// All living objects. Never destroyed, because threads of streams may outlive main().
struct Machine {
  std::mutex mutex;
  std::atomic<pid_t> pid =
      0;  // the caller of cuInit; CUDA does not work in its children
  std::array<ContextTag, 8> contexts;
  int devices = 1;
  std::map<Stream, std::shared_ptr<StreamTag>> streams;
  std::map<Event, std::unique_ptr<EventTag>> events;
  std::map<Module, std::unique_ptr<ModuleTag>> modules;
  std::set<Function> functions;
  struct Memory {
    size_t bytes;
    Device device;
  };
  std::map<Pointer, Memory> memory;
  stub::Failures failures{"CUDA_STUB_FAIL"};
  stub::Log log{"CUDA_STUB_LOG"};
  std::chrono::microseconds delay{};

  Machine() {
    devices = std::clamp(static_cast<int>(stub::KnobNumber("CUDA_STUB_DEVICES", 1)), 0,
                         static_cast<int>(contexts.size()));
    delay = std::chrono::microseconds(
        static_cast<long>(stub::KnobNumber("CUDA_STUB_DELAY_US", 0)));
    for (int d = 0; d < devices; d++) contexts[static_cast<size_t>(d)].device = d;
  }
};
inline Machine& g_machine = *new Machine;
inline thread_local Context t_current = nullptr;

enum class Needs { kNothing, kInit, kContext };

// Makes the checks at the beginning of every function.
inline Outcome Enter(const char* function, Needs needs) {
  if (g_machine.failures.Strikes(function)) return kUnknown;
  if (t_on_stream) return kNotPermitted;
  if (needs == Needs::kNothing) return kSuccess;
  if (g_machine.pid != getpid()) return kNotInitialized;
  if (needs == Needs::kContext && (t_current == nullptr || t_current->retained == 0))
    return kInvalidContext;
  return kSuccess;
}

#define STUB_ENTER(needs)                                                           \
  do {                                                                              \
    if (const Outcome entered = Enter(__func__, Needs::needs); entered != kSuccess) \
      return entered;                                                               \
  } while (0)

// Returns null if there is no such stream. 0, 1 and 2 denote the default stream.
inline std::shared_ptr<StreamTag> FindStream(Stream stream) {
  std::lock_guard lock(g_machine.mutex);
  if (reinterpret_cast<uintptr_t>(stream) <= 2) {
    if (t_current == nullptr || t_current->retained == 0) return nullptr;
    auto& default_stream = t_current->default_stream;
    if (!default_stream) default_stream = std::make_shared<StreamTag>(t_current);
    return default_stream;
  }
  const auto found = g_machine.streams.find(stream);
  return found == g_machine.streams.end() ? nullptr : found->second;
}

inline EventTag* FindEvent(Event event) {
  const auto found = g_machine.events.find(event);
  return found == g_machine.events.end() ? nullptr : found->second.get();
}

inline Outcome Enqueue(Stream handle, std::function<void()> work) {
  const auto stream = FindStream(handle);
  if (!stream) return kInvalidHandle;
  stream->Push(std::move(work));
  return kSuccess;
}

#define STUB_DECLARE(member, name, types) STUB_EXPORT Outcome name types;
RINGJAX_CUDA_FUNCTIONS(STUB_DECLARE)
RINGJAX_CUDA_OPTIONAL(STUB_DECLARE)
// Functions that only the tests of the stub use.
STUB_EXPORT Outcome cuEventElapsedTime(float*, Event, Event);
STUB_EXPORT Outcome cuMemAlloc_v2(Pointer*, size_t);
STUB_EXPORT Outcome cuMemFree_v2(Pointer);
STUB_EXPORT Outcome cuMemcpyDtoHAsync_v2(void*, Pointer, size_t, Stream);
// For libnccl_stub.
STUB_EXPORT Outcome cuLaunchHostFunc(Stream stream, HostFunction function, void* data);
STUB_EXPORT unsigned long long stub_cuda_pushed(Stream stream);
// For tests: counts events, streams except default streams, and allocations.
STUB_EXPORT void stub_cuda_alive(size_t* events, size_t* streams, size_t* memory);
#undef STUB_DECLARE

}  // namespace ringjax::cuda
