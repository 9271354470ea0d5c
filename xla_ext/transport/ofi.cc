// See ofi.h.
#include "transport/ofi.h"

#include <dlfcn.h>
#include <stdlib.h>

#include <atomic>
#include <memory>
#include <mutex>

namespace ringjax::ofi {
namespace {

constexpr char kSoname[] = "libfabric.so.1";

std::mutex opening_libfabric;
std::atomic<const Library*> opened_libfabric{nullptr};

// Providers read these variables when the library is loaded, for the whole process.
// Without its variable EFA ends a process that forks. Memory of a link is not inherited
// by children (fabric_slots.h), so forks are safe, and the variables only say so.
void AllowForks() {
  for (const char* name : {"FI_EFA_FORK_SAFE", "RDMAV_FORK_SAFE",
                           "RDMAV_HUGEPAGES_SAFE", "CXI_FORK_SAFE", "CXI_FORK_SAFE_HP"})
    setenv(name, "1", 0);
}

std::string WhyNotLoaded() {
  const char* why = dlerror();
  return why ? why : "unknown error";
}

Result<void*> OpenFile(const std::string& path) {
  // Plugins of NCCL, and MPI, bring libfabric into the process, too. Two copies would
  // share the environment variables and the limits of the cards.
  if (void* mapped = dlopen(kSoname, RTLD_NOW | RTLD_NOLOAD)) return mapped;
  const char* file = path.empty() ? kSoname : path.c_str();
  if (void* library = dlopen(file, RTLD_NOW | RTLD_LOCAL)) return library;
  return Status(Code::kFailedPrecondition, "no libfabric: " + WhyNotLoaded());
}

Result<const Library*> LoadLibfabric(const std::string& path) {
  AllowForks();
  Result<void*> file = OpenFile(path);
  if (!file.ok()) return file.status();
  auto library = std::make_unique<Library>();
#define RINGJAX_LOAD(member, name, version, result, types)                     \
  library->member =                                                            \
      reinterpret_cast<result(*) types>(/* NOLINT */                           \
                                        dlvsym(file.value(), #name, version)); \
  if (library->member == nullptr)                                              \
    return Status(Code::kFailedPrecondition,                                   \
                  "libfabric is older than 1.9: " + WhyNotLoaded());
  RINGJAX_OFI_FUNCTIONS(RINGJAX_LOAD)
#undef RINGJAX_LOAD
  library->version = library->GetVersion();
  Dl_info info = {};
  if (dladdr(reinterpret_cast<void*>(library->GetInfo), &info) != 0 && info.dli_fname)
    library->path = info.dli_fname;
  return library.release();  // never freed
}

}  // namespace

Status Library::Check(std::string_view call, ssize_t code) const {
  if (code == 0) return OkStatus();
  const char* meaning = StrError(static_cast<int>(code < 0 ? -code : code));
  return Status(Code::kUnavailable,
                std::string(call) + ": " + (meaning ? meaning : std::to_string(code)));
}

Result<const Library*> OpenLibfabric(const std::string& path) {
  std::lock_guard lock(opening_libfabric);
  if (const Library* done = opened_libfabric.load()) return done;
  Result<const Library*> loaded = LoadLibfabric(path);
  if (loaded.ok()) opened_libfabric.store(loaded.value());
  return loaded;
}

}  // namespace ringjax::ofi
