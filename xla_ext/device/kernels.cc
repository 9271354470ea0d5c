// Loads the device code and launches kernels with tables of tensors.
#include "device/kernels.h"

#include <algorithm>
#include <vector>

#include "cuda/blob.h"
#include "cuda/pack_abi.h"

namespace ringjax::cuda {
namespace {

constexpr int kLargeParameters = 12010;  // first driver with parameters beyond 4 KiB
// A launch has one block for every two chunks, up to this number. On an H200, one block
// for every two chunks moves large tensors at 95 % of the speed of the driver's own
// copy; fewer blocks that loop over the chunks reach 90 %.
constexpr uint64_t kMaxBlocks = 1 << 24;

// Returns the images that may run on the device, best first: fatbins, then machine
// code, then PTX, which the driver must compile; in each kind the highest `sm` first.
std::vector<const Image*> InOrderOfFit(int compute_capability) {
  std::vector<const Image*> fit;
  for (const Image& image : DeviceImages()) {
    const bool same_major = image.sm / 10 == compute_capability / 10;
    if (image.kind == "fatbin" ||
        (image.sm <= compute_capability && (same_major || image.kind == "ptx")))
      fit.push_back(&image);
  }
  auto key = [](const Image* i) {
    return std::pair(i->kind == "fatbin" ? 2 : i->kind == "cubin" ? 1 : 0, i->sm);
  };
  std::stable_sort(fit.begin(), fit.end(),
                   [&](const Image* a, const Image* b) { return key(a) > key(b); });
  return fit;
}

}  // namespace

Result<std::unique_ptr<Kernels>> Kernels::Load(const Driver& driver, Device device) {
  std::unique_ptr<Kernels> kernels(new Kernels(driver));
  int version = 0, major = 0, minor = 0;
  RJ_CUDA(driver, DriverGetVersion, &version);
  RJ_CUDA(driver, DeviceGetAttribute, &major, kAttributeMajor, device);
  RJ_CUDA(driver, DeviceGetAttribute, &minor, kAttributeMinor, device);
  kernels->large_ = version >= kLargeParameters && major >= 7;
  if (!DeviceImages().empty()) {
    RJ_TRY(kernels->LoadCode(major * 10 + minor));
    RJ_TRY(kernels->LoadAll());
  }
  return kernels;
}

// Loads all kernels now. With CUDA's lazy loading, the first launch of a kernel may
// wait for all work on the device, even for an NCCL kernel that waits for a lost rank.
Status Kernels::LoadAll() {
  std::vector<std::string> names = {"rj_pack_bytes_bytes", "rj_unpack_bytes_bytes"};
  for (int d = 0; d < kDTypeCount; ++d) {
    const DType dtype = static_cast<DType>(d);
    const std::string name(Name(dtype));
    if (!HasArithmetic(dtype)) continue;
    for (const char* way : {"rj_pack_", "rj_unpack_"}) {
      names.push_back(way + name + "_" + name);
      if (dtype == DType::kF32 || dtype == DType::kF64)
        for (const char* wire : {"_f16", "_bf16"}) names.push_back(way + name + wire);
    }
    if (IsFloat(dtype)) names.push_back("rj_seal_" + name);
  }
  for (const std::string& name : names)
    for (int capacity : {kPackSmall, kPackLarge}) {
      if (capacity == kPackLarge && !large_) continue;
      Result<Function> function = Find(name + "_" + std::to_string(capacity));
      if (!function.ok()) return function.status();
      if (driver_.FuncLoad != nullptr)
        RJ_TRY(driver_.Check(driver_.FuncLoad(function.value()), "cuFuncLoad"));
    }
  return OkStatus();
}

Kernels::~Kernels() {
  if (module_ != nullptr) driver_.ModuleUnload(module_);
}

Status Kernels::LoadCode(int compute_capability) {
  Status last(Code::kFailedPrecondition, "none fits");
  for (const Image* image : InOrderOfFit(compute_capability)) {
    last = driver_.Check(driver_.ModuleLoadData(&module_, image->data),
                         "cuModuleLoadData");
    if (last.ok()) return last;
    module_ = nullptr;
  }
  return Status(Code::kFailedPrecondition,
                "device code from " + std::string(DeviceCodeOrigin()) +
                    " does not run on a device of compute capability " +
                    std::to_string(compute_capability) + ": " + last.message());
}

Result<Function> Kernels::Find(const std::string& name) {
  std::lock_guard lock(mutex_);
  auto found = functions_.find(name);
  if (found == functions_.end()) {
    Function function = nullptr;
    RJ_TRY(driver_.Check(driver_.ModuleGetFunction(&function, module_, name.c_str()),
                         "cuModuleGetFunction of " + name));
    found = functions_.emplace(name, function).first;
  }
  return found->second;
}

Status Kernels::Pack(std::span<const Patch> patches, DType dtype, DType wire,
                     double scale, const Target& target) {
  if (dtype == wire && scale == 1.0)
    return Launch({"rj_pack_bytes_bytes", kPackChunkBytes, Width(dtype)}, patches,
                  scale, target);
  return Launch({"rj_pack_" + std::string(Name(dtype)) + "_" + std::string(Name(wire)),
                 kPackChunkBytes / std::max(Width(dtype), Width(wire)), 1},
                patches, scale, target);
}

Status Kernels::Unpack(std::span<const Patch> patches, DType dtype, DType wire,
                       double scale, const Target& target) {
  // The copying kernel cannot write NaN, so poison needs the kernel of the dtype.
  if (dtype == wire && scale == 1.0 && !(IsFloat(dtype) && target.poison != 0))
    return Launch({"rj_unpack_bytes_bytes", kPackChunkBytes, Width(dtype)}, patches,
                  scale, target);
  return Launch(
      {"rj_unpack_" + std::string(Name(dtype)) + "_" + std::string(Name(wire)),
       kPackChunkBytes / std::max(Width(dtype), Width(wire)), 1},
      patches, scale, target);
}

Status Kernels::Seal(std::span<const Patch> patches, DType dtype,
                     const Target& target) {
  if (!IsFloat(dtype) || target.poison == 0) return OkStatus();
  return Launch({"rj_seal_" + std::string(Name(dtype)), UINT64_MAX, 1}, patches, 1.0,
                target);
}

Status Kernels::Launch(const Kind& kind, std::span<const Patch> patches, double scale,
                       const Target& target) {
  while (!patches.empty()) {
    const size_t most = large_ ? kPackLarge : kPackSmall;
    const auto batch = patches.first(std::min(most, patches.size()));
    patches = patches.subspan(batch.size());
    if (batch.size() <= kPackSmall)
      RJ_TRY(LaunchTable<kPackSmall>(kind.name + "_" + std::to_string(kPackSmall), kind,
                                     batch, scale, target));
    else
      RJ_TRY(LaunchTable<kPackLarge>(kind.name + "_" + std::to_string(kPackLarge), kind,
                                     batch, scale, target));
  }
  return OkStatus();
}

template <int N>
Status Kernels::LaunchTable(const std::string& name, const Kind& kind,
                            std::span<const Patch> patches, double scale,
                            const Target& target) {
  Result<Function> function = Find(name);
  if (!function.ok()) return function.status();
  PackTable<N> table;  // kernels read only the first `count` entries
  table.fused = target.fused;
  table.poison = target.poison;
  table.scale = scale;
  table.count = 0;
  uint64_t chunks = 0;
  for (const Patch& p : patches) {
    const uint64_t elements = p.elements * kind.factor;
    if (elements == 0) continue;
    if (p.offset / 16 > UINT32_MAX)
      return Status(Code::kInvalidArgument, "a fused buffer has at most 64 GiB");
    table.entries[table.count++] = {p.tensor, elements, static_cast<unsigned>(chunks),
                                    static_cast<unsigned>(p.offset / 16)};
    chunks += (elements - 1) / kind.chunk + 1;
  }
  if (table.count == 0) return OkStatus();
  if (chunks > UINT32_MAX)
    return Status(Code::kInvalidArgument, "more than 64 TiB in one launch");
  table.chunks = static_cast<unsigned>(chunks);
  constexpr uint64_t kTeams = kPackThreads / kPackTeam;
  const unsigned blocks = static_cast<unsigned>(
      std::min<uint64_t>((chunks + kTeams - 1) / kTeams, kMaxBlocks));
  void* parameters[] = {&table};
  const Outcome launched =
      driver_.LaunchKernel(function.value(), blocks, 1, 1, kPackThreads, 1, 1, 0,
                           target.stream, parameters, nullptr);
  if (launched != kSuccess) return driver_.Check(launched, "cuLaunchKernel of " + name);
  if (target.launches != nullptr) ++*target.launches;
  return OkStatus();
}

}  // namespace ringjax::cuda
