// Opens libcuda.so.1 with dlopen, and reads the properties of the devices.
#include "device/driver.h"

#include <dlfcn.h>

#include <cstdio>
#include <memory>

namespace ringjax::cuda {
namespace {

Result<const Driver*> Load() {
  // The library stays open: other libraries use the driver until the process ends.
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  if (library == nullptr) {
    const char* why = dlerror();
    return Status(Code::kFailedPrecondition,
                  std::string("no CUDA driver: ") + (why ? why : "libcuda.so.1"));
  }
  auto driver = std::make_unique<Driver>();
#define RINGJAX_LOAD(member, name, types)                                     \
  driver->member =                                                            \
      reinterpret_cast<Outcome(*) types>(dlsym(library, #name)); /* NOLINT */ \
  if (driver->member == nullptr)                                              \
    return Status(Code::kFailedPrecondition,                                  \
                  "the CUDA driver is too old: libcuda.so.1 has no " #name);
  RINGJAX_CUDA_FUNCTIONS(RINGJAX_LOAD)
#undef RINGJAX_LOAD
#define RINGJAX_LOAD(member, name, types) \
  driver->member =                        \
      reinterpret_cast<Outcome(*) types>(dlsym(library, #name)); /* NOLINT */
  RINGJAX_CUDA_OPTIONAL(RINGJAX_LOAD)
#undef RINGJAX_LOAD
  if (Status s = driver->Check(driver->Init(0), "cuInit"); !s.ok())
    return Status(Code::kFailedPrecondition, s.message());
  return driver.release();  // never freed
}

}  // namespace

Status Driver::Check(Outcome outcome, std::string_view what) const {
  if (outcome == kSuccess) return OkStatus();
  const char *name = nullptr, *text = nullptr;
  if (GetErrorName != nullptr) GetErrorName(outcome, &name);
  if (GetErrorString != nullptr) GetErrorString(outcome, &text);
  std::string message("cu");
  if (what.substr(0, 2) == "cu") message.clear();
  message.append(what).append(": ");
  message += name ? name : "error " + std::to_string(outcome);
  if (text != nullptr) message.append(" (").append(text).append(")");
  return Status(Code::kInternal, message);
}

Result<const Driver*> OpenDriver() {
  static const Result<const Driver*> driver = Load();
  return driver;
}

Result<DriverInfo> DescribeDriver() {
  auto opened = OpenDriver();
  if (!opened.ok()) return opened.status();
  const Driver& driver = *opened.value();
  DriverInfo info;
  int count = 0;
  RJ_CUDA(driver, DriverGetVersion, &info.version);
  RJ_CUDA(driver, DeviceGetCount, &count);
  for (int i = 0; i < count; ++i) {
    Device device = 0;
    char name[256] = {};
    unsigned char uuid[16] = {};
    int major = 0, minor = 0;
    RJ_CUDA(driver, DeviceGet, &device, i);
    if (driver.DeviceGetName != nullptr)
      RJ_CUDA(driver, DeviceGetName, name, sizeof name - 1, device);
    RJ_CUDA(driver, DeviceGetUuid, uuid, device);
    RJ_CUDA(driver, DeviceGetAttribute, &major, kAttributeMajor, device);
    RJ_CUDA(driver, DeviceGetAttribute, &minor, kAttributeMinor, device);
    std::string hex = "GPU-";
    for (int b = 0; b < 16; ++b) {
      char digits[4];
      std::snprintf(digits, sizeof digits, "%02x", uuid[b]);
      if (b == 4 || b == 6 || b == 8 || b == 10) hex += '-';
      hex += digits;
    }
    info.devices.push_back({name, hex, major * 10 + minor});
  }
  return info;
}

}  // namespace ringjax::cuda
