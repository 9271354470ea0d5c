// The device code of pack.cu as it was compiled into this extension, if a compiler for
// it was found: build_blob.py writes the source file that defines these.
#pragma once

#include <cstddef>
#include <span>
#include <string_view>

namespace ringjax::cuda {

struct Image {
  std::string_view kind;  // "fatbin" (the driver chooses), "cubin" or "ptx"
  int sm;                 // 90 for sm_90; the lowest one of a fatbin
  const unsigned char* data;
  size_t size;
};

std::span<const Image> DeviceImages();  // empty: built without device code
std::string_view DeviceCodeOrigin();    // "nvcc 13.0", "nvrtc 12.1", or "none"

}  // namespace ringjax::cuda
