// Copies and sums of the limit.

#ifndef RINGJAX_BENCHMARKS_LIMIT_COPY_H_
#define RINGJAX_BENCHMARKS_LIMIT_COPY_H_

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

constexpr int kMaxRanks = 32;

inline float Wide(float x) { return x; }
inline float Wide(uint16_t x) { return std::bit_cast<float>(uint32_t{x} << 16); }

inline void Narrow(float x, float* out) { *out = x; }
inline void Narrow(float x, uint16_t* out) {  // rounds to the nearest, ties to even
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  *out = static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

using Sources = std::array<const char*, kMaxRanks>;
using Adder = void (*)(const Sources&, char*, char*, size_t, float);

// Adds the sources and writes the sum to both results. The results may be one memory,
// and also that of a source.
template <typename T, size_t... kRank>
void Add(const Sources& sources, char* first, char* second, size_t bytes, float scale) {
  const T* in[] = {reinterpret_cast<const T*>(sources[kRank])...};
  T* a = reinterpret_cast<T*>(first);
  T* b = reinterpret_cast<T*>(second);
  const size_t count = bytes / sizeof(T);
#pragma GCC ivdep
  for (size_t i = 0; i < count; ++i) {
    T sum;
    Narrow(scale * (... + Wide(in[kRank][i])), &sum);
    a[i] = sum;
    b[i] = sum;
  }
}

template <typename T, size_t... kRank>
constexpr Adder AdderOf(std::index_sequence<kRank...>) {
  return Add<T, kRank...>;
}

template <typename T, size_t... kRanks>
constexpr std::array<Adder, kMaxRanks> Adders(std::index_sequence<kRanks...>) {
  return {AdderOf<T>(std::make_index_sequence<kRanks + 1>())...};
}

constexpr auto kRankCounts = std::make_index_sequence<kMaxRanks>();
constexpr auto kAddFloat = Adders<float>(kRankCounts);
constexpr auto kAddBfloat16 = Adders<uint16_t>(kRankCounts);

// memcpy may be a string instruction, which is the fastest copy within the caches of a
// core, but several times slower for lines that a distant core has written.
enum Copying { kMemcpy, kStreamed, kVector };

inline void CopyVector(char* to, const char* from, size_t bytes) {
  size_t i = 0;
#ifdef __AVX__
  for (; i + 128 <= bytes; i += 128) {
    const auto* in = reinterpret_cast<const __m256i*>(from + i);
    auto* out = reinterpret_cast<__m256i*>(to + i);
    const __m256i a = _mm256_loadu_si256(in), b = _mm256_loadu_si256(in + 1);
    const __m256i c = _mm256_loadu_si256(in + 2), d = _mm256_loadu_si256(in + 3);
    _mm256_storeu_si256(out, a);
    _mm256_storeu_si256(out + 1, b);
    _mm256_storeu_si256(out + 2, c);
    _mm256_storeu_si256(out + 3, d);
  }
#endif
  std::memcpy(to + i, from + i, bytes - i);
}

// Copies past the caches, without reading the lines that it overwrites.
inline void CopyPast(char* to, const char* from, size_t bytes) {
#ifdef __AVX__
  size_t head = -reinterpret_cast<uintptr_t>(to) % 32;
  head = std::min(head, bytes);
  std::memcpy(to, from, head);
  size_t i = head;
  for (; i + 32 <= bytes; i += 32) {
    const auto* line = reinterpret_cast<const __m256i*>(from + i);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i), _mm256_loadu_si256(line));
  }
  std::memcpy(to + i, from + i, bytes - i);
  _mm_sfence();
#else
  std::memcpy(to, from, bytes);
#endif
}

inline void Copy(Copying how, char* to, const char* from, size_t bytes) {
  switch (how) {
    case kStreamed:
      return CopyPast(to, from, bytes);
    case kVector:
      return CopyVector(to, from, bytes);
    case kMemcpy:
      std::memcpy(to, from, bytes);
  }
}

#endif  // RINGJAX_BENCHMARKS_LIMIT_COPY_H_
