// ByLevel<F>(...): calls F compiled for the newest generation of x86-64 that this CPU
// is (x86-64-v4, v3 or what the compiler was told); elsewhere there is one.
//
// Chosen here, by cpuid, and not by the compiler's clones: those need the dynamic
// linker's help, which sanitizers and zig do not have, and Clang has no such names.
// F must be RINGJAX_INLINE, and all that it calls too: the code is only as new as the
// function that it is inlined into.
#pragma once

#include <atomic>

namespace ringjax {

enum class CpuLevel : int { kBase, kV3, kV4 };

// What this CPU, and the system for its registers, can do.
CpuLevel DetectedLevel();

namespace internal {
inline std::atomic<CpuLevel> level{DetectedLevel()};
}  // namespace internal

inline CpuLevel Level() { return internal::level.load(std::memory_order_relaxed); }

// Tests: an older generation than the CPU is, for as long as this lives.
class LevelForTests {
 public:
  explicit LevelForTests(CpuLevel level) : before_(Level()) {
    internal::level = level < DetectedLevel() ? level : DetectedLevel();
  }
  ~LevelForTests() { internal::level = before_; }
  LevelForTests(const LevelForTests&) = delete;
  LevelForTests& operator=(const LevelForTests&) = delete;

 private:
  const CpuLevel before_;
};

#if defined(__x86_64__)
// By their parts: zig tells Clang of each one that it is not there, which outweighs
// "arch=x86-64-v3".
#define RINGJAX_V3_PARTS "avx2,bmi,bmi2,f16c,fma,lzcnt,movbe,popcnt"
#define RINGJAX_V3 gnu::target(RINGJAX_V3_PARTS)
#define RINGJAX_V4 \
  gnu::target(RINGJAX_V3_PARTS ",avx512f,avx512bw,avx512cd,avx512dq,avx512vl")

template <auto F, typename... Args>
[[RINGJAX_V4]] auto AtV4(const Args&... args) {
  return F(args...);
}
template <auto F, typename... Args>
[[RINGJAX_V3]] auto AtV3(const Args&... args) {
  return F(args...);
}
template <auto F, typename... Args>
auto ByLevel(const Args&... args) {
  if (Level() == CpuLevel::kV4) return AtV4<F>(args...);
  if (Level() == CpuLevel::kV3) return AtV3<F>(args...);
  return F(args...);
}
#else
template <auto F, typename... Args>
auto ByLevel(const Args&... args) {
  return F(args...);
}
#endif

}  // namespace ringjax
