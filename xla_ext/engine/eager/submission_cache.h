// The submission cache: numbers for submissions that all ranks have received, so that
// each is described once and sent as a number from then on. The idea is Horovod's
// response cache. The cache is the same on all ranks, because all of them make the same
// calls to it. If the cache is full, the least recently used submission loses its
// number to the new one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "engine/eager/submission.h"

namespace ringjax {

class SubmissionCache {
 public:
  static constexpr uint32_t kNone = UINT32_MAX;

  explicit SubmissionCache(size_t capacity);

  uint32_t Find(const Submission& submission) const;  // kNone: not stored

  // Numbers below size() are in use.
  size_t size() const { return entries_.size(); }
  const SubmissionPtr& operator[](uint32_t number) const {
    return entries_[number].form;
  }

  // Marks an entry as the most recently used one.
  void Touch(uint32_t number) {
    if (number != newest_) MoveToNewest(number);
  }

  // Gives the submission a number, or touches it if it has one. Returns the number, and
  // the submission that had this number before (null: none). kNone: the submission is
  // not stored, because the capacity is 0 or another submission has the same hash.
  struct Inserted {
    uint32_t number = kNone;
    bool is_new = false;
    SubmissionPtr forgotten;
  };
  Inserted Insert(SubmissionPtr submission);

 private:
  struct Entry {
    SubmissionPtr form;
    uint64_t hash = 0;
    uint32_t older = kNone, newer = kNone;
  };
  void MoveToNewest(uint32_t number);
  void Unlink(uint32_t number);
  void Link(uint32_t number);  // the entry becomes the newest

  size_t capacity_;
  std::vector<Entry> entries_;
  std::unordered_map<uint64_t, uint32_t> by_hash_;
  uint32_t oldest_ = kNone, newest_ = kNone;
};

}  // namespace ringjax
