// The dimensions of a tensor. Up to six dimensions need no allocation, because in a
// call with hundreds of tensors allocations would take most of the time to describe the
// call.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <vector>

namespace ringjax {

class Dims {
 public:
  Dims() = default;
  Dims(std::initializer_list<int64_t> dims) { assign(dims.begin(), dims.end()); }
  Dims(const std::vector<int64_t>& dims) {  // NOLINT: implicit by design
    assign(dims.begin(), dims.end());
  }

  template <typename Iterator>
  void assign(Iterator first, Iterator last) {
    size_ = static_cast<size_t>(last - first);
    if (size_ > kInline) more_.assign(first, last);
    std::copy(first, size_ > kInline ? first : last, few_.begin());
  }

  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  const int64_t* begin() const { return size_ > kInline ? more_.data() : few_.data(); }
  const int64_t* end() const { return begin() + size_; }
  int64_t operator[](size_t i) const { return begin()[i]; }

 private:
  static constexpr size_t kInline = 6;

  size_t size_ = 0;
  std::array<int64_t, kInline> few_;
  std::vector<int64_t> more_;  // all dimensions, if there are more than kInline
};

}  // namespace ringjax
