// SubmissionCache: assigns an index to each submission that all ranks have received. A
// rank sends a submission in full once, and then only its index, as with Horovod's
// response cache. All ranks make the same calls to their caches, so all caches are
// equal. If the cache is full, a new submission replaces the least recently used one at
// its index.
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

  uint32_t Find(const Submission& submission) const;  // kNone if it is not stored

  // Indices below size() are in use.
  size_t size() const { return entries_.size(); }
  const SubmissionPtr& operator[](uint32_t number) const {
    return entries_[number].form;
  }

  // Marks an entry as the most recently used one.
  void Touch(uint32_t number);

  // Stores a submission at an index, or touches it if the cache has it already.
  struct Inserted {
    // The index of the submission. kNone if it was not stored, because the capacity is
    // 0 or another submission has the same hash.
    uint32_t number = kNone;
    bool is_new = false;
    SubmissionPtr forgotten;  // the submission that had this index before, or null
  };
  Inserted Insert(SubmissionPtr submission);

 private:
  struct Entry {
    SubmissionPtr form;
    uint64_t hash = 0;
    uint32_t older = kNone, newer = kNone;
  };
  void Unlink(uint32_t number);
  void Link(uint32_t number);  // makes the entry the newest

  size_t capacity_;
  std::vector<Entry> entries_;
  std::unordered_map<uint64_t, uint32_t> by_hash_;
  uint32_t oldest_ = kNone, newest_ = kNone;
};

}  // namespace ringjax
