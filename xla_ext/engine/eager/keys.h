// What negotiation knows of each key, that is, of each operation and name. Only data:
// what is made of it is in negotiation.cc.
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

// What is known of one key. Pending from the first submission to the decision.
struct Key {
  SubmissionPtr any;  // the first one's description; null: not pending
  std::vector<SubmissionPtr> by_rank;
  int submitted = 0;
  int submitted_and_joined = 0;  // ranks that are both, so that they count once
  bool alike = true;             // all descriptions are one object
  uint64_t id = 0;
  Key *older = nullptr, *newer = nullptr;  // among the pending ones
  uint32_t numbers = 0;                    // descriptions of it that have a number
};

using Keys = std::unordered_map<KeyName, Key, KeyHash, KeyEqual>;

}  // namespace ringjax
