// The device code of pack.cu that was compiled into this extension, if the build found
// a compiler for it. build_blob.py writes the source file that defines the functions.
#pragma once

#include <cstddef>
#include <span>
#include <string_view>

namespace ringjax::cuda {

struct Image {
  std::string_view kind;  // "fatbin" (the driver chooses a part), "cubin" or "ptx"
  int sm;                 // 90 for sm_90; in a fatbin, the lowest architecture
  const unsigned char* data;
  size_t size;
};

std::span<const Image> DeviceImages();  // empty if built without device code
std::string_view DeviceCodeOrigin();    // "nvcc 13.0", "nvrtc 12.1", or "none"

}  // namespace ringjax::cuda
