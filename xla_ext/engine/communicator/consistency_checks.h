// ConsistencyChecks: counts of the checks that all ranks hold equal parameters, and
// their results (ffi/check.cc).
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>

namespace ringjax {

// The state of each check on one communicator. Thread-safe. The key of a check is a
// hash of its name.
class ConsistencyChecks {
 public:
  struct Check {
    std::atomic<uint32_t> count{0};   // invocations, or a flag; see ffi/check.cc
    std::atomic<bool> warned{false};  // whether the last comparison found a difference
  };
  // The reference is valid as long as this object, because a std::map moves no element.
  Check& at(uint64_t site) {
    std::lock_guard lock(mutex_);
    return checks_[site];
  }

 private:
  std::mutex mutex_;  // guards checks_
  std::map<uint64_t, Check> checks_;
};

}  // namespace ringjax
