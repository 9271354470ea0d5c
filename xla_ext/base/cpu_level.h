// ByLevel<F>(...) calls F, compiled for the highest level of x86-64 that this CPU has:
// x86-64-v4, x86-64-v3, or the level that the build targets. On other architectures
// there is one version of F.
//
// The choice is made here with cpuid, and not with the compiler's function clones.
// Clones need help from the dynamic linker, which sanitizers and zig do not provide,
// and Clang does not accept the levels' names. F and all functions that F calls must be
// RINGJAX_INLINE: a function uses the instructions of a level only if it is inlined
// into a function that is compiled for that level.
#pragma once

#include <atomic>

namespace ringjax {

enum class CpuLevel : int { kBase, kV3, kV4 };

// Returns the highest level that the CPU supports and whose registers the system saves.
CpuLevel DetectedLevel();

namespace internal {
inline std::atomic<CpuLevel> level{DetectedLevel()};
}  // namespace internal

inline CpuLevel Level() { return internal::level.load(std::memory_order_relaxed); }

// For tests: lowers Level() to `level` as long as the object lives. A level above
// DetectedLevel() has no effect.
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
// The features are listed one by one, because zig disables each of them for Clang,
// which overrides "arch=x86-64-v3".
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
