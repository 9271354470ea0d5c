// An array that the core can read or write in place.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <array>
#include <bit>
#include <optional>
#include <span>
#include <string_view>
#include <utility>

#include "engine/eager/lane.h"

namespace ringjax {

// Keeps the memory of an array accessible while this object lives. Look returns false
// if the array is not C-contiguous or if the core does not have its element type.
class PlainArray {
 public:
  PlainArray() = default;
  ~PlainArray() {
    if (view_.obj != nullptr) PyBuffer_Release(&view_);
  }
  PlainArray(const PlainArray&) = delete;
  PlainArray& operator=(const PlainArray&) = delete;

  bool Look(PyObject* array, bool writeable) {
    const int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT;
    if (PyObject_GetBuffer(array, &view_, flags | (writeable ? PyBUF_WRITABLE : 0))) {
      PyErr_Clear();
      return false;
    }
    const auto found = Named(view_.format, view_.itemsize);
    if (found) dtype_ = *found;
    return found.has_value();
  }
  std::span<const Py_ssize_t> dims() const {
    return {view_.shape, static_cast<size_t>(view_.ndim)};
  }
  Submission::Piece piece() const {
    Submission::Piece piece{dtype_, {}};
    piece.dims.assign(dims().begin(), dims().end());
    return piece;
  }
  void* address() const { return view_.buf; }
  uint64_t bytes() const { return static_cast<uint64_t>(view_.len); }
  bool Overlaps(const PlainArray& other) const {
    const auto from = [](const PlainArray& p) {
      return static_cast<const char*>(p.address());
    };
    return from(*this) < from(other) + other.bytes() &&
           from(other) < from(*this) + bytes();
  }
  // Whether rows of both arrays have the same type and shape; row counts may differ.
  bool IsLike(const PlainArray& other) const {
    const auto own = dims(), others = other.dims();
    return dtype_ == other.dtype_ && own.size() == others.size() && !own.empty() &&
           std::equal(own.begin() + 1, own.end(), others.begin() + 1);
  }

 private:
  // Returns the element type of a native format of Python's struct module, or nullopt.
  static std::optional<DType> Named(const char* format, Py_ssize_t width) {
    constexpr std::pair<std::string_view, std::array<DType, 4>> kKinds[] = {
        {"bhilq", {DType::kI8, DType::kI16, DType::kI32, DType::kI64}},
        {"BHILQ", {DType::kU8, DType::kU16, DType::kU32, DType::kU64}}};
    const std::string_view name = format == nullptr ? "B" : format;
    if (name == "f") return DType::kF32;
    if (name == "d") return DType::kF64;
    if (name == "e") return DType::kF16;
    if (name == "?") return DType::kBool;
    if (name == "Zf") return DType::kC64;
    if (name == "Zd") return DType::kC128;
    for (const auto& [letters, dtypes] : kKinds)
      if (name.size() == 1 && letters.find(name[0]) != letters.npos)
        return dtypes[static_cast<size_t>(
            std::countr_zero(static_cast<size_t>(width)))];
    return std::nullopt;
  }

  Py_buffer view_ = {};
  DType dtype_ = DType::kF32;
};

}  // namespace ringjax
