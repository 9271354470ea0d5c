// The kernels of pack.cu, loaded into one device and launched on a stream.
//
// Tensors of any number and alignment go into a few launches: the table of addresses
// travels in the kernel's parameters, so nothing is copied to the device first.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>

#include "base/dtype.h"
#include "device/driver.h"

namespace ringjax::cuda {

struct Patch {
  Pointer tensor;
  uint64_t elements;
  uint64_t offset;  // bytes in the fused buffer, a multiple of 16; not used to seal
};

class Kernels {
 public:
  // Loads the code for the device whose context is current. An extension without device
  // code gives an object that is not `available`.
  static Result<std::unique_ptr<Kernels>> Load(const Driver& driver, Device device);
  ~Kernels();
  Kernels(const Kernels&) = delete;
  Kernels& operator=(const Kernels&) = delete;

  bool available() const { return module_ != nullptr; }

  // Work for one stream. `launches` counts the kernels.
  struct Target {
    Stream stream;
    Pointer fused;
    Pointer poison;  // word of the device; 0: never
    uint64_t* launches;
  };

  // fused <- scale * tensors, as `wire`.
  Status Pack(std::span<const Patch> patches, DType dtype, DType wire, double scale,
              const Target& target);
  // tensors <- scale * fused; NaN where the poison word is set.
  Status Unpack(std::span<const Patch> patches, DType dtype, DType wire, double scale,
                const Target& target);
  // Makes floating-point tensors NaN at their beginning if the poison word is set.
  Status Seal(std::span<const Patch> patches, DType dtype, const Target& target);

 private:
  Kernels(const Driver& driver) : driver_(driver) {}  // NOLINT: private
  Status LoadCode(int compute_capability);
  Status LoadAll();
  Result<Function> Find(const std::string& name);
  // `bytes`: a plain copy, elements count bytes. `chunk`: elements in a chunk.
  struct Kind {
    std::string name;  // without the capacity
    uint64_t chunk;
    uint64_t factor;  // table elements for each element of a patch
  };
  Status Launch(const Kind& kind, std::span<const Patch> patches, double scale,
                const Target& target);
  template <int N>
  Status LaunchTable(const std::string& name, const Kind& kind,
                     std::span<const Patch> patches, double scale,
                     const Target& target);

  const Driver& driver_;
  Module module_ = nullptr;
  bool large_ = false;  // parameters beyond 4 KiB
  std::mutex mutex_;    // guards functions_
  std::map<std::string, Function> functions_;
};

}  // namespace ringjax::cuda
