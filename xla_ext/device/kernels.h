// The kernels of pack.cu, loaded into one device and launched on a stream.
//
// A few launches serve any number of tensors of any alignment. The table of addresses
// is a parameter of the kernel, so nothing is copied to the device before the launch.
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

// Returns whether pack.cu casts and scales this dtype. pack.cu only copies the elements
// of other dtypes.
inline bool HasArithmetic(DType t) {
  return t != DType::kBool && t != DType::kI16 && t != DType::kU16 && !IsComplex(t);
}

// One of the tensors that a launch copies.
struct Patch {
  Pointer tensor;
  uint64_t elements;
  uint64_t offset;  // bytes in the fused buffer, a multiple of 16; Seal ignores it
};

// Launches are safe from any thread; the CUDA context of the device must be current.
class Kernels {
 public:
  // Loads the code for the device whose context is current. If the extension was built
  // without device code, returns an object that is not `available`.
  static Result<std::unique_ptr<Kernels>> Load(const Driver& driver, Device device);
  ~Kernels();
  Kernels(const Kernels&) = delete;
  Kernels& operator=(const Kernels&) = delete;

  bool available() const { return module_ != nullptr; }

  struct Target {
    Stream stream;
    Pointer fused;       // the fused buffer, 16-byte aligned
    Pointer poison;      // the poison word on the device; 0 if there is none
    uint64_t* launches;  // incremented for each kernel; may be null
  };

  // Writes the tensors, times `scale` and in the dtype `wire`, to the fused buffer.
  Status Pack(std::span<const Patch> patches, DType dtype, DType wire, double scale,
              const Target& target);
  // Writes the fused buffer, times `scale`, to the tensors. Writes NaN instead if the
  // poison word is set and `dtype` is a floating-point type.
  Status Unpack(std::span<const Patch> patches, DType dtype, DType wire, double scale,
                const Target& target);
  // Writes NaN to the beginning of floating-point tensors if the poison word is set.
  Status Seal(std::span<const Patch> patches, DType dtype, const Target& target);

 private:
  Kernels(const Driver& driver) : driver_(driver) {}  // NOLINT: private
  Status LoadCode(int compute_capability);
  Status LoadAll();
  Result<Function> Find(const std::string& name);
  struct Kind {
    std::string name;  // kernel name without the capacity
    uint64_t chunk;    // the most PackEntry::elements in one chunk
    uint64_t factor;   // PackEntry::elements for each of Patch::elements
  };
  Status Launch(const Kind& kind, std::span<const Patch> patches, double scale,
                const Target& target);
  template <int N>
  Status LaunchTable(const std::string& name, const Kind& kind,
                     std::span<const Patch> patches, double scale,
                     const Target& target);

  const Driver& driver_;
  Module module_ = nullptr;
  bool large_ = false;  // the device takes more than 4 KiB of parameters
  std::mutex mutex_;    // guards functions_
  std::map<std::string, Function> functions_;
};

}  // namespace ringjax::cuda
