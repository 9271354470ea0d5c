// A stub of the CUDA driver: the functions that ringjax calls, on a machine without a
// GPU. Device memory is memory of the host, a stream is a thread, and a kernel is
// pack.cu compiled for the CPU. README.md in this folder says what the stub cannot
// show.
//
// For wrong handles, contexts and sizes the stub returns the errors of the driver and
// does not crash, so that a test reports a mistake that a GPU might report much later.
#include <cstdio>
#include <cstring>
#include <vector>

#include "cuda_machine.h"
#include "emulated_kernels.h"

namespace ringjax::cuda {

Outcome cuInit(unsigned flags) {
  STUB_ENTER(kNothing);
  if (flags != 0) return kInvalidValue;
  if (g_machine.devices == 0) return 100;  // CUDA_ERROR_NO_DEVICE
  std::lock_guard lock(g_machine.mutex);
  if (g_machine.pid == 0) g_machine.pid = getpid();
  return g_machine.pid == getpid() ? kSuccess : kNotInitialized;
}

Outcome cuDriverGetVersion(int* version) {
  STUB_ENTER(kNothing);
  if (version == nullptr) return kInvalidValue;
  *version = static_cast<int>(stub::KnobNumber("CUDA_STUB_VERSION", 13000));
  return kSuccess;
}

namespace {
struct ErrorText {
  Outcome code;
  const char *name, *text;
};
constexpr ErrorText kErrors[] = {
    {kSuccess, "CUDA_SUCCESS", "no error"},
    {kInvalidValue, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {kOutOfMemory, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {kNotInitialized, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {100, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {kInvalidDevice, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {kInvalidContext, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {kInvalidHandle, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {kNotFound, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {kNotReady, "CUDA_ERROR_NOT_READY", "device not ready"},
    {kNotPermitted, "CUDA_ERROR_NOT_PERMITTED", "operation not permitted"},
    {kUnknown, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

Outcome Describe(Outcome code, const char* ErrorText::* member, const char** text) {
  if (text == nullptr) return kInvalidValue;
  *text = nullptr;
  for (const ErrorText& error : kErrors)
    if (error.code == code) *text = error.*member;
  return *text != nullptr ? kSuccess : kInvalidValue;
}
}  // namespace

Outcome cuGetErrorName(Outcome code, const char** text) {
  return Describe(code, &ErrorText::name, text);
}

Outcome cuGetErrorString(Outcome code, const char** text) {
  return Describe(code, &ErrorText::text, text);
}

Outcome cuDeviceGetCount(int* count) {
  STUB_ENTER(kInit);
  if (count == nullptr) return kInvalidValue;
  *count = g_machine.devices;
  return kSuccess;
}

Outcome cuDeviceGet(Device* device, int ordinal) {
  STUB_ENTER(kInit);
  if (device == nullptr) return kInvalidValue;
  if (ordinal < 0 || ordinal >= g_machine.devices) return kInvalidDevice;
  *device = ordinal;
  return kSuccess;
}

namespace {
bool Exists(Device device) { return device >= 0 && device < g_machine.devices; }
}  // namespace

Outcome cuDeviceGetName(char* name, int length, Device device) {
  STUB_ENTER(kInit);
  if (name == nullptr || length <= 0) return kInvalidValue;
  if (!Exists(device)) return kInvalidDevice;
  std::snprintf(name, static_cast<size_t>(length), "stub of a GPU");
  return kSuccess;
}

Outcome cuDeviceGetUuid(unsigned char* uuid, Device device) {
  STUB_ENTER(kInit);
  if (uuid == nullptr) return kInvalidValue;
  if (!Exists(device)) return kInvalidDevice;
  // By default each process has its own devices, as ranks on different GPUs have.
  const std::string host =
      stub::Knob("CUDA_STUB_UUID", std::to_string(getpid()).c_str());
  std::memset(uuid, 0, 16);
  std::memcpy(uuid, host.data(), std::min<size_t>(host.size(), 15));
  uuid[15] = static_cast<unsigned char>(device);
  return kSuccess;
}

Outcome cuDeviceGetAttribute(int* value, int attribute, Device device) {
  STUB_ENTER(kInit);
  if (value == nullptr) return kInvalidValue;
  if (!Exists(device)) return kInvalidDevice;
  switch (attribute) {
    case 1:
      *value = 1024;
      return kSuccess;  // threads per block
    case 10:
      *value = 32;
      return kSuccess;  // threads per warp
    case 16:
      *value = 132;
      return kSuccess;  // multiprocessors
    case kAttributeMajor:
      *value = 9;
      return kSuccess;
    case kAttributeMinor:
      *value = 0;
      return kSuccess;
    default:
      return kInvalidValue;
  }
}

Outcome cuDevicePrimaryCtxRetain(Context* context, Device device) {
  STUB_ENTER(kInit);
  if (context == nullptr) return kInvalidValue;
  if (!Exists(device)) return kInvalidDevice;
  std::lock_guard lock(g_machine.mutex);
  *context = &g_machine.contexts[static_cast<size_t>(device)];
  (*context)->retained++;
  return kSuccess;
}

Outcome cuDevicePrimaryCtxRelease_v2(Device device) {
  STUB_ENTER(kInit);
  if (!Exists(device)) return kInvalidDevice;
  std::lock_guard lock(g_machine.mutex);
  const Context context = &g_machine.contexts[static_cast<size_t>(device)];
  if (context->retained == 0) return kInvalidContext;
  if (--context->retained > 0) return kSuccess;
  // Streams of the context end when they are empty. Memory that was not freed remains.
  if (context->default_stream) context->default_stream->Close();
  context->default_stream = nullptr;
  std::erase_if(g_machine.streams, [&](auto& s) {
    if (s.second->context == context) s.second->Close();
    return s.second->context == context;
  });
  std::erase_if(g_machine.events,
                [&](auto& e) { return e.second->context == context; });
  std::erase_if(g_machine.functions,
                [&](auto f) { return f->module->context == context; });
  std::erase_if(g_machine.modules,
                [&](auto& m) { return m.second->context == context; });
  return kSuccess;
}

Outcome cuCtxGetCurrent(Context* context) {
  STUB_ENTER(kInit);
  if (context == nullptr) return kInvalidValue;
  *context = t_current;
  return kSuccess;
}

Outcome cuCtxSetCurrent(Context context) {
  STUB_ENTER(kInit);
  const auto known = [&](const ContextTag& one) { return &one == context; };
  if (context != nullptr &&
      (std::ranges::none_of(g_machine.contexts, known) || context->retained == 0))
    return kInvalidContext;
  t_current = context;
  return kSuccess;
}

Outcome cuCtxGetDevice(Device* device) {
  STUB_ENTER(kContext);
  if (device == nullptr) return kInvalidValue;
  *device = t_current->device;
  return kSuccess;
}

Outcome cuModuleLoadData(Module* module, const void* image) {
  STUB_ENTER(kContext);
  if (module == nullptr || image == nullptr) return kInvalidValue;
  auto loaded = std::make_unique<ModuleTag>();
  loaded->context = t_current;
  *module = loaded.get();
  std::lock_guard lock(g_machine.mutex);
  g_machine.modules[*module] = std::move(loaded);
  return kSuccess;
}

Outcome cuModuleUnload(Module module) {
  STUB_ENTER(kContext);
  std::lock_guard lock(g_machine.mutex);
  if (!g_machine.modules.contains(module)) return kInvalidHandle;
  std::erase_if(g_machine.functions, [&](auto f) { return f->module == module; });
  g_machine.modules.erase(module);
  return kSuccess;
}

Outcome cuModuleGetFunction(Function* function, Module module, const char* name) {
  STUB_ENTER(kContext);
  if (function == nullptr || name == nullptr) return kInvalidValue;
  std::lock_guard lock(g_machine.mutex);
  const auto found = g_machine.modules.find(module);
  if (found == g_machine.modules.end()) return kInvalidHandle;
  const stub::Kernel kernel = stub::FindKernel(name);
  if (kernel.run == nullptr) return kNotFound;
  auto& entry = found->second->functions[name];
  if (!entry) entry = std::make_unique<FunctionTag>(FunctionTag{module, kernel, name});
  g_machine.functions.insert(*function = entry.get());
  return kSuccess;
}

Outcome cuLaunchKernel(Function function, unsigned grid_x, unsigned grid_y,
                       unsigned grid_z, unsigned block_x, unsigned block_y,
                       unsigned block_z, unsigned shared, Stream handle,
                       void** parameters, void** extra) {
  STUB_ENTER(kContext);
  const auto stream = FindStream(handle);
  if (!stream) return kInvalidHandle;
  if (grid_x == 0 || grid_y != 1 || grid_z != 1 || block_x == 0 || block_x > 1024 ||
      block_y != 1 || block_z != 1 || shared > 48 << 10)
    return kInvalidValue;
  if (parameters == nullptr || parameters[0] == nullptr || extra != nullptr)
    return kInvalidValue;
  stub::Kernel kernel;
  std::string name;
  {
    std::lock_guard lock(g_machine.mutex);
    if (!g_machine.functions.contains(function)) return kInvalidHandle;
    if (function->module->context != stream->context) return kInvalidHandle;
    kernel = function->kernel;
    name = function->name;
  }
  // The launch copies the parameters, because the caller may reuse their memory.
  auto copy = std::make_shared<std::vector<unsigned long long>>(
      (kernel.parameter_bytes + 7) / 8);
  std::memcpy(copy->data(), parameters[0], kernel.parameter_bytes);
  g_machine.log.Write("{\"pid\": " + std::to_string(getpid()) + ", \"kernel\": \"" +
                      name + "\", \"grid\": " + std::to_string(grid_x) +
                      ", \"block\": " + std::to_string(block_x) + "}");
  stream->Push([=] {
    if (g_machine.delay.count() > 0) std::this_thread::sleep_for(g_machine.delay);
    kernel.run(copy->data(), grid_x, block_x);
  });
  return kSuccess;
}

Outcome cuLaunchHostFunc(Stream stream, HostFunction function, void* data) {
  STUB_ENTER(kInit);
  if (function == nullptr) return kInvalidValue;
  return Enqueue(stream, [=] { function(data); });
}

// Linking fails if one of the functions that ringjax looks up is not defined here.
#define STUB_ADDRESS(member, name, types) reinterpret_cast<void*>(&name),
STUB_EXPORT const void* const stub_cuda_functions[];
const void* const stub_cuda_functions[] = {RINGJAX_CUDA_FUNCTIONS(STUB_ADDRESS)};

}  // namespace ringjax::cuda
