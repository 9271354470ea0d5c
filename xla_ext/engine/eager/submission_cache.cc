// Implements SubmissionCache as an array of entries with a map from hashes to indices
// and a list in order of last use. See submission_cache.h.
#include "engine/eager/submission_cache.h"

#include <algorithm>
#include <utility>

namespace ringjax {

SubmissionCache::SubmissionCache(size_t capacity)
    : capacity_(std::min<size_t>(capacity, kNone)) {}

uint32_t SubmissionCache::Find(const Submission& submission) const {
  if (entries_.empty()) return kNone;
  // Many programs repeat one operation, which is then found without its hash.
  if (entries_[newest_].form->Same(submission)) return newest_;
  const auto found = by_hash_.find(submission.Hash());
  if (found == by_hash_.end()) return kNone;
  return entries_[found->second].form->Same(submission) ? found->second : kNone;
}

SubmissionCache::Inserted SubmissionCache::Insert(SubmissionPtr submission) {
  Inserted place;
  if (capacity_ == 0) return place;
  const uint64_t hash = submission->Hash();
  if (const auto found = by_hash_.find(hash); found != by_hash_.end()) {
    // If another submission has the same hash, the new submission is not stored.
    if (!entries_[found->second].form->Same(*submission)) return place;
    place.number = found->second;
    Touch(place.number);
    return place;
  }
  if (entries_.size() < capacity_) {
    place.number = static_cast<uint32_t>(entries_.size());
    entries_.emplace_back();
  } else {
    place.number = oldest_;
    Unlink(place.number);
    place.forgotten = std::move(entries_[place.number].form);
    by_hash_.erase(entries_[place.number].hash);
  }
  place.is_new = true;
  entries_[place.number].form = std::move(submission);
  entries_[place.number].hash = hash;
  by_hash_.emplace(hash, place.number);
  Link(place.number);
  return place;
}

void SubmissionCache::Touch(uint32_t number) {
  if (number == newest_) return;
  Unlink(number);
  Link(number);
}

void SubmissionCache::Unlink(uint32_t number) {
  const Entry& entry = entries_[number];
  (entry.older == kNone ? oldest_ : entries_[entry.older].newer) = entry.newer;
  (entry.newer == kNone ? newest_ : entries_[entry.newer].older) = entry.older;
}

void SubmissionCache::Link(uint32_t number) {
  entries_[number].older = newest_;
  entries_[number].newer = kNone;
  (newest_ == kNone ? oldest_ : entries_[newest_].newer) = number;
  newest_ = number;
}

}  // namespace ringjax
