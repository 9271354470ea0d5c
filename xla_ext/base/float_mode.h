// A FloatMode gives the calling thread IEEE 754 arithmetic while the object lives. Its
// destructor restores the mode that the thread had before.
//
// A thread may flush denormals to zero, as the threads of XLA and TensorFlow do, and a
// new thread inherits its creator's mode. For such a thread two different denormals are
// equal, and its sums have other bits than those of a rank that does not flush. So the
// functions of base/reduce.h and base/moments.h that compute hold a FloatMode.
//
// If the thread has the right mode already, a FloatMode only reads a register. So a
// caller of many short functions holds one FloatMode around all of them, and the
// FloatModes in the functions change nothing. No thread holds a FloatMode while it
// waits, because a wait may run callbacks, such as Python's signal handlers.
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
  // The clobber "memory" keeps the compiler from moving loads and stores, and so the
  // arithmetic between them, across the change of mode.
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
