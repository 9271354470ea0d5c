// Spans: a request's memory as a list of pieces, addressed by their concatenation.
//
// This is what makes fusion free on the CPU: a tree of gradients is one long vector to
// the schedules, and nobody packs it.
#pragma once

#include <sys/uio.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace ringjax {

struct Span {
  std::byte* data = nullptr;
  uint64_t bytes = 0;
};

class Spans {
 public:
  // Empty pieces are dropped: their pointers may be garbage.
  void Add(void* data, uint64_t bytes) {
    if (bytes == 0) return;
    starts_.push_back(total_);
    spans_.push_back({static_cast<std::byte*>(data), bytes});
    total_ += bytes;
  }
  uint64_t bytes() const { return total_; }
  bool empty() const { return total_ == 0; }

  // The longest contiguous piece at `offset`, at most `limit` bytes.
  Span At(uint64_t offset, uint64_t limit) const {
    const size_t i = Find(offset);
    const uint64_t skip = offset - starts_[i];
    return {spans_[i].data + skip, std::min(limit, spans_[i].bytes - skip)};
  }

  // Appends the pieces of [offset, offset + bytes), at most `most` of them.
  void Pieces(uint64_t offset, uint64_t bytes, size_t most,
              std::vector<iovec>* out) const {
    for (size_t i = bytes ? Find(offset) : 0; bytes > 0 && most > 0; ++i, --most) {
      const uint64_t skip = offset - starts_[i];
      const uint64_t n = std::min(bytes, spans_[i].bytes - skip);
      out->push_back({spans_[i].data + skip, n});
      offset += n;
      bytes -= n;
    }
  }

 private:
  // Steps walk forward, so the span used last is the first guess.
  size_t Find(uint64_t offset) const {
    size_t i = hint_;
    if (i >= starts_.size() || offset < starts_[i] ||
        offset >= starts_[i] + spans_[i].bytes) {
      auto after = std::upper_bound(starts_.begin(), starts_.end(), offset);
      i = static_cast<size_t>(after - starts_.begin()) - 1;
    }
    hint_ = i;
    return i;
  }

  std::vector<Span> spans_;
  std::vector<uint64_t> starts_;
  uint64_t total_ = 0;
  mutable size_t hint_ = 0;
};

}  // namespace ringjax
