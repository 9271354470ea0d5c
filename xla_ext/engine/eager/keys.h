// The table of operations in a negotiation: which rank has submitted what. An entry has
// a collective and a name as its key. negotiation.cc changes the table.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "engine/call/hash.h"
#include "engine/eager/submission.h"

namespace ringjax {

struct KeyView {
  Collective op;
  std::string_view name;
  bool operator==(const KeyView&) const = default;
};
struct KeyName {
  Collective op;
  std::string name;
  operator KeyView() const { return {op, name}; }  // NOLINT: implicit by design
};
struct KeyHash {
  using is_transparent = void;
  size_t operator()(KeyView key) const {
    Hash hash;
    hash.Add(static_cast<uint64_t>(key.op));
    hash.Add(key.name);
    return hash.value();
  }
};
struct KeyEqual {
  using is_transparent = void;
  bool operator()(KeyView a, KeyView b) const { return a == b; }
};

// The submissions of one operation by all ranks, stored under its key. A key is pending
// from the first submission of any rank until the negotiation decides about the
// operation.
struct Key {
  SubmissionPtr any;  // the first submission; null if the key is not pending
  std::vector<SubmissionPtr> by_rank;
  int submitted = 0;             // ranks that have submitted the key
  int submitted_and_joined = 0;  // ranks that did both, which IsReady counts once
  bool alike = true;             // whether all submissions so far are the object `any`
  uint64_t id = 0;               // see Negotiation::Waiting::id
  Key *older = nullptr, *newer = nullptr;  // neighbors in the list of pending keys
  uint32_t numbers = 0;                    // submissions with this key in the cache
  uint64_t seen_in = 0;  // 1 + the last round in which ReadEqual has seen the key
};

using Keys = std::unordered_map<KeyName, Key, KeyHash, KeyEqual>;

}  // namespace ringjax
