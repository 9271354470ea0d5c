// Numbers for descriptions that all ranks have heard, so that they are described once
// and named from then on. Alike on all ranks because all make the same calls; the least
// recently used description gives its number to a new one where there is no room.
#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "engine/eager/submission.h"

namespace ringjax {

class Numbering {
 public:
  static constexpr uint32_t kNone = UINT32_MAX;

  explicit Numbering(size_t capacity);

  uint32_t Find(const Submission& submission) const;  // or kNone

  // Numbers below size() are in use.
  size_t size() const { return entries_.size(); }
  const SubmissionPtr& operator[](uint32_t number) const {
    return entries_[number].form;
  }

  // Is now the last one to be forgotten.
  void Touch(uint32_t number) {
    if (number != newest_) MoveToNewest(number);
  }

  // Gives a number to what has none; what has one is touched. The number, and whose it
  // was before (null: nobody's). kNone: not kept.
  struct Place {
    uint32_t number = kNone;
    bool is_new = false;
    SubmissionPtr forgotten;
  };
  Place Insert(SubmissionPtr submission);

 private:
  struct Entry {
    SubmissionPtr form;
    uint64_t hash = 0;
    uint32_t older = kNone, newer = kNone;
  };
  void MoveToNewest(uint32_t number);
  void Unlink(uint32_t number);
  void Link(uint32_t number);  // as the newest

  size_t capacity_;
  std::vector<Entry> entries_;
  std::unordered_map<uint64_t, uint32_t> by_hash_;
  uint32_t oldest_ = kNone, newest_ = kNone;
};

}  // namespace ringjax
