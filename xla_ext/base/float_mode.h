// FloatMode: arithmetic as IEEE 754 has it, whatever the thread that calls has set.
//
// A thread may flush denormals to zero, as XLA's and TensorFlow's do, and inherits that
// from the one that started it. To such a thread two different denormals are equal, and
// its sums have other bits than those of a rank that does not flush. So every function
// of base/ that computes holds one of these, and puts back what it found.
//
// Costs a read of a register where nothing is to be changed: who makes many short calls
// holds one around them all. Never held while waiting: callbacks run there.
#pragma once

#include <cstdint>

namespace ringjax {

class FloatMode {
 public:
#if defined(__x86_64__)
  using Control = uint32_t;  // MXCSR
  static constexpr Control kOrdinary = 0x1f80, kFlags = 0x3f;
  static Control Get() {
    Control control;
    asm volatile("stmxcsr %0" : "=m"(control)::"memory");
    return control;
  }
  // No load or store, hence no arithmetic between them, moves across.
  static void Set(Control control) {
    asm volatile("ldmxcsr %0" ::"m"(control) : "memory");
  }
#elif defined(__aarch64__)
  using Control = uint64_t;  // FPCR
  static constexpr Control kOrdinary = 0, kFlags = 0;
  static Control Get() {
    Control control;
    asm volatile("mrs %0, fpcr" : "=r"(control)::"memory");
    return control;
  }
  static void Set(Control control) {
    asm volatile("msr fpcr, %0" ::"r"(control) : "memory");
  }
#else
  using Control = uint32_t;
  static constexpr Control kOrdinary = 0, kFlags = 0;
  static Control Get() { return kOrdinary; }
  static void Set(Control) {}
#endif

  FloatMode() : before_(Get()), changes_((before_ & ~kFlags) != kOrdinary) {
    if (changes_) Set(kOrdinary);
  }
  ~FloatMode() {
    if (changes_) Set(before_);
  }
  FloatMode(const FloatMode&) = delete;
  FloatMode& operator=(const FloatMode&) = delete;

 private:
  const Control before_;
  const bool changes_;
};

}  // namespace ringjax
