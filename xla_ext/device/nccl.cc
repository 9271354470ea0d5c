// Opens libnccl.so.2 with dlopen.
#include "device/nccl.h"

#include <dlfcn.h>

#include <atomic>
#include <memory>
#include <mutex>

namespace ringjax::nccl {
namespace {

constexpr char kSoname[] = "libnccl.so.2";
// Since 2.26 NCCL can order the kernels of several communicators on one device
// (NCCL_LAUNCH_ORDER_IMPLICIT). 2.27 is what JAX's plugin for CUDA 13 requires, and no
// older version has been tested.
constexpr int kOldest = 22700;

std::mutex opening;
std::atomic<const Nccl*> opened{nullptr};

std::string LoaderError() {
  const char* why = dlerror();
  return why ? why : "unknown error";
}

Result<void*> Open(const std::string& path) {
  // Two copies of NCCL could not order their kernels against each other, so a copy that
  // is already mapped is preferred to any path.
  if (void* mapped = dlopen(kSoname, RTLD_NOW | RTLD_NOLOAD)) return mapped;
  const char* file = path.empty() ? kSoname : path.c_str();
  if (void* library = dlopen(file, RTLD_NOW | RTLD_LOCAL)) return library;
  return Status(Code::kFailedPrecondition, "no NCCL: " + LoaderError());
}

Result<const Nccl*> Load(const std::string& path) {
  Result<void*> library = Open(path);
  if (!library.ok()) return library.status();
  auto nccl = std::make_unique<Nccl>();
#define RINGJAX_LOAD(member, name, types)                                             \
  nccl->member =                                                                      \
      reinterpret_cast<Outcome(*) types>(dlsym(library.value(), #name)); /* NOLINT */ \
  if (nccl->member == nullptr)                                                        \
    return Status(Code::kFailedPrecondition,                                          \
                  "NCCL is too old: " + path + " has no " #name);
  RINGJAX_NCCL_FUNCTIONS(RINGJAX_LOAD)
#undef RINGJAX_LOAD
  nccl->GetErrorString = reinterpret_cast<const char* (*)(Outcome)>(
      dlsym(library.value(), "ncclGetErrorString"));
  nccl->GetLastError = reinterpret_cast<const char* (*)(Comm)>(
      dlsym(library.value(), "ncclGetLastError"));
  if (Status s = nccl->Check(nccl->GetVersion(&nccl->version), "ncclGetVersion");
      !s.ok())
    return s;
  Dl_info info = {};
  if (dladdr(reinterpret_cast<void*>(nccl->GetVersion), &info) != 0 && info.dli_fname)
    nccl->path = info.dli_fname;
  if (nccl->version < kOldest)
    return Status(Code::kFailedPrecondition,
                  "NCCL " + std::to_string(nccl->version) + " (" + nccl->path +
                      ") is too old: 2.27 or newer is needed");
  return nccl.release();  // never freed
}

}  // namespace

Status Nccl::Check(Outcome outcome, std::string_view what, Comm comm) const {
  if (outcome == kSuccess || outcome == kInProgress) return OkStatus();
  std::string text(what);
  text += ": ";
  const char* meaning = GetErrorString != nullptr ? GetErrorString(outcome) : nullptr;
  text += meaning ? meaning : "NCCL error " + std::to_string(outcome);
  const char* last = GetLastError != nullptr ? GetLastError(comm) : nullptr;
  if (last != nullptr && *last != '\0') text.append(" (").append(last).append(")");
  return Status(Code::kUnavailable, text);
}

Result<const Nccl*> OpenNccl(const std::string& path) {
  std::lock_guard lock(opening);
  if (const Nccl* done = opened.load()) return done;
  Result<const Nccl*> loaded = Load(path);
  if (loaded.ok()) opened.store(loaded.value());
  return loaded;
}

const Nccl* OpenedNccl() { return opened.load(); }

}  // namespace ringjax::nccl
