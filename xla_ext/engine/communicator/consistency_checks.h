// The states of the checks that all ranks hold the same parameters (ffi/check.cc).
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>

namespace ringjax {

// The checks of one communicator, by the hash of their names. Thread-safe.
class ConsistencyChecks {
 public:
  struct Check {
    std::atomic<uint32_t> count{0};   // invocations, or a flag; see ffi/check.cc
    std::atomic<bool> warned{false};  // the last comparison has found a difference
  };
  // The reference is valid as long as this object.
  Check& at(uint64_t site) {
    std::lock_guard lock(mutex_);
    return checks_[site];  // std::map: the reference stays valid
  }

 private:
  std::mutex mutex_;  // guards checks_
  std::map<uint64_t, Check> checks_;
};

}  // namespace ringjax
