// ShortVector: a vector that stores its first elements in itself, without an
// allocation. An operation on one tensor has lists of one element, and the allocations
// of these lists would take a tenth of the time of a short operation.
#pragma once

#include <algorithm>
#include <cstddef>
#include <initializer_list>
#include <memory>
#include <new>
#include <utility>
#include <vector>

namespace ringjax {

// Has the functions of std::vector that ringjax needs, with the same meaning. Stores up
// to `kInline` elements without an allocation. A move of such a vector moves its
// elements, so references to them do not stay valid.
template <typename T, size_t kInline>
class ShortVector {
 public:
  using value_type = T;

  ShortVector() = default;
  explicit ShortVector(size_t size) { resize(size); }
  ShortVector(std::initializer_list<T> list) { assign(list.begin(), list.end()); }
  ShortVector(const std::vector<T>& list) {  // NOLINT: implicit by design
    assign(list.begin(), list.end());
  }
  ShortVector(const ShortVector& other) { assign(other.begin(), other.end()); }
  ShortVector(ShortVector&& other) noexcept { Take(&other); }
  ShortVector& operator=(const ShortVector& other) {
    if (this != &other) assign(other.begin(), other.end());
    return *this;
  }
  ShortVector& operator=(ShortVector&& other) noexcept {
    if (this == &other) return *this;
    Release();
    Take(&other);
    return *this;
  }
  ~ShortVector() { Release(); }

  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  T* data() { return data_; }
  const T* data() const { return data_; }
  T* begin() { return data_; }
  T* end() { return data_ + size_; }
  const T* begin() const { return data_; }
  const T* end() const { return data_ + size_; }
  T& operator[](size_t i) { return data_[i]; }
  const T& operator[](size_t i) const { return data_[i]; }
  T& front() { return data_[0]; }
  const T& front() const { return data_[0]; }
  T& back() { return data_[size_ - 1]; }
  const T& back() const { return data_[size_ - 1]; }
  bool operator==(const ShortVector& other) const {
    return std::equal(begin(), end(), other.begin(), other.end());
  }

  void reserve(size_t capacity) {
    if (capacity > capacity_) Grow(capacity);
  }
  void push_back(T value) { emplace_back(std::move(value)); }
  // The arguments must not refer to elements of this vector.
  template <typename... Arguments>
  T& emplace_back(Arguments&&... arguments) {
    if (size_ == capacity_) Grow(2 * capacity_);
    T* const made = std::construct_at(end(), std::forward<Arguments>(arguments)...);
    ++size_;
    return *made;
  }
  void pop_back() { std::destroy_at(data_ + --size_); }
  void clear() {
    std::destroy_n(data_, size_);
    size_ = 0;
  }
  void resize(size_t size) {
    reserve(size);
    while (size_ < size) emplace_back();
    while (size_ > size) pop_back();
  }
  // The range must not belong to this vector.
  template <typename Iterator>
  void assign(Iterator first, Iterator last) {
    clear();
    reserve(static_cast<size_t>(std::distance(first, last)));
    for (; first != last; ++first) emplace_back(*first);
  }

 private:
  T* Inline() { return reinterpret_cast<T*>(inline_); }
  void Release() {
    clear();
    if (data_ != Inline()) std::allocator<T>().deallocate(data_, capacity_);
    data_ = Inline();
    capacity_ = kInline;
  }
  // Takes the elements of `*other`. This vector must be as after Release.
  void Take(ShortVector* other) {
    if (other->data_ == other->Inline()) {
      std::uninitialized_move_n(other->data_, other->size_, data_);
      size_ = other->size_;
      other->clear();
      return;
    }
    data_ = std::exchange(other->data_, other->Inline());
    size_ = std::exchange(other->size_, 0);
    capacity_ = std::exchange(other->capacity_, kInline);
  }
  void Grow(size_t capacity) {
    T* const more = std::allocator<T>().allocate(capacity);
    const size_t size = size_;
    std::uninitialized_move_n(data_, size, more);
    Release();
    data_ = more;
    size_ = size;
    capacity_ = capacity;
  }

  T* data_ = Inline();
  size_t size_ = 0, capacity_ = kInline;
  alignas(T) std::byte inline_[kInline * sizeof(T)];
};

}  // namespace ringjax
