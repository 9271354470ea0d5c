// The kernels that copy many tensors into a fused buffer and back, with casts and
// scaling, and that write NaN to tensors after a collective has failed. Compiled by
// nvcc or NVRTC without any CUDA header, and for the CPU by cuda_on_cpu.h.
//
// NCCL reduces the fused buffer between packing and unpacking. No kernel uses shared
// memory or synchronises threads, and no two threads touch the same element. So running
// the threads one after another on the CPU is equivalent.
//
// One launch serves many tensors; their table is its parameter. The work is cut into
// chunks of kPackChunkBytes. Half a block takes one chunk at a time: four loads of 16
// bytes per thread, all in flight before the first result is used. The results have the
// bits of base/reduce.h on the CPU; only the bits of a NaN may differ.
//
// Poison. ncclCommAbort ends NCCL's kernels early, so the data that are unpacked after
// an abort are garbage and must not pass for gradients. The host sets the poison word
// before the abort.
//   - rj_unpack_<tensor>_<wire> reads the word once, and writes NaN to float tensors if
//     the word is set. It makes the scale NaN for that, which costs nothing.
//   - rj_unpack_bytes and the integer kernels cannot poison a tensor. For a float
//     tensor that is neither cast nor scaled, rj_unpack_f32_f32 and its like with scale
//     1 move the same bytes as fast: use them if there is a poison word.
//   - rj_seal_<tensor> is for tensors that NCCL reduced in place. It writes NaN to the
//     first chunk of each tensor: one NaN makes a result void, and a large tensor need
//     not be rewritten. If the word is not set, the kernel reads the word and ends.
#include "pack_abi.h"

#ifdef __CUDACC__
#include "pack_ptx.h"
#define RINGJAX_UNROLL _Pragma("unroll")
#define RINGJAX_ROLLED _Pragma("unroll 1")
#else
#define RINGJAX_UNROLL
#define RINGJAX_ROLLED
#endif

namespace ringjax::cuda {

template <typename V>
__device__ __forceinline__ V Bits(V v) {
  return v;
}

// Element types: the stored type, the type of the arithmetic, and the bits of a NaN.
struct Half {
  using Stored = unsigned short;
  using Value = float;
  static constexpr Stored kNan = 0x7e00;
  __device__ static Value Widen(Stored v) { return HalfToFloat(v); }
  __device__ static Stored Narrow(float v) { return FloatToHalf(v); }
  __device__ static Stored Narrow(double v) { return DoubleToHalf(v); }
};
struct BFloat16 {
  using Stored = unsigned short;
  using Value = float;
  static constexpr Stored kNan = 0x7fc0;
  __device__ static Value Widen(Stored v) { return BFloat16ToFloat(v); }
  __device__ static Stored Narrow(float v) { return FloatToBFloat16(v); }
  __device__ static Stored Narrow(double v) { return DoubleToBFloat16(v); }
};
template <typename V, typename Bits, Bits kBits>
struct Native {
  using Stored = V;
  using Value = V;
  static constexpr Bits kNan = kBits;
  __device__ static Value Widen(Stored v) { return v; }
  __device__ static Stored Narrow(V v) { return v; }
};
using Float = Native<float, unsigned int, 0x7fc00000u>;
using Double = Native<double, unsigned long long, 0x7ff8000000000000ull>;

template <typename V, V kLowest, V kHighest>
struct Integer {
  using Stored = V;
  using Value = V;

  // Rounds toward zero. A value out of range becomes the nearest limit, NaN becomes 0.
  __device__ static V Truncated(double v) {
    if (v >= static_cast<double>(kHighest)) return kHighest;
    if (v <= static_cast<double>(kLowest)) return kLowest;
    return v != v ? V{0} : static_cast<V>(v);
  }
};
using Int8 = Integer<signed char, -128, 127>;
using Int32 = Integer<int, -2147483647 - 1, 2147483647>;
using Int64 = Integer<long long, -9223372036854775807ll - 1, 9223372036854775807ll>;
using UInt8 = Integer<unsigned char, 0, 255>;
using UInt32 = Integer<unsigned int, 0, 4294967295u>;
using UInt64 = Integer<unsigned long long, 0, 18446744073709551615ull>;

struct Bytes {
  using Stored = unsigned char;
};

// The cast and the scaling of one element. `T` is the type of the tensor. To hide the
// latency of the memory, a thread loads kInFlight units (see MoveChunk) before it uses
// the first of them.
template <typename T>
struct Change {
  static constexpr unsigned int kInFlight = 4;
  using Value = typename T::Value;
  Value scale;

  template <int N>
  __device__ Change(const PackTable<N>& table, bool poisoned)
      : scale(static_cast<Value>(poisoned ? __uint_as_float(Float::kNan)
                                          : table.scale)) {}

  template <typename To, typename From>
  __device__ typename To::Stored Apply(typename From::Stored v) const {
    return To::Narrow(static_cast<Value>(From::Widen(v)) * scale);
  }
};

template <typename V, V kLowest, V kHighest>
struct Change<Integer<V, kLowest, kHighest>> {
  // Integer tensors are rare, and scaling them is bound by arithmetic: small code
  // matters more than hiding the latency of the memory.
  static constexpr unsigned int kInFlight = 1;
  double scale;

  template <int N>
  __device__ Change(const PackTable<N>& table, bool) : scale(table.scale) {}

  template <typename To, typename From>
  __device__ V Apply(V v) const {
    return scale == 1.0 ? v : To::Truncated(static_cast<double>(v) * scale);
  }
};

template <>
struct Change<Bytes> {
  static constexpr unsigned int kInFlight = 4;
  template <int N>
  __device__ Change(const PackTable<N>&, bool) {}

  template <typename To, typename From>
  __device__ unsigned char Apply(unsigned char v) const {
    return v;
  }
};

// Accesses of any alignment, for the ends of tensors and for unaligned tensors.
template <typename V>
__device__ __forceinline__ V LoadAnywhere(Address at) {
  V v;
  memcpy(&v, reinterpret_cast<const void*>(at), sizeof(V));
  return v;
}
template <typename V>
__device__ __forceinline__ void StoreAnywhere(Address at, V value) {
  const V v = Bits(value);
  memcpy(reinterpret_cast<void*>(at), &v, sizeof(V));
}

template <int kBytes>
struct WordsOf;
template <>
struct WordsOf<16> {
  using Type = uint4;
};
template <>
struct WordsOf<8> {
  using Type = uint2;
};
template <>
struct WordsOf<4> {
  using Type = unsigned int;
};

// The half of a block that shares a chunk, and its index among all such teams. The
// first halves have the lowest indices, so that a few chunks spread over all blocks.
struct Team {
  unsigned int thread = threadIdx.x % kPackTeam;
  unsigned int index = blockIdx.x + threadIdx.x / kPackTeam * gridDim.x;
  unsigned int count = gridDim.x * (kPackThreads / kPackTeam);
};

// Finds the last entry that begins at or before `chunk`. An entry without elements is
// not found, because the next entry has the same first_chunk.
template <int N>
__device__ __forceinline__ unsigned int EntryOf(const PackTable<N>& table,
                                                unsigned int chunk) {
  unsigned int low = 0, high = table.count;
  while (high - low > 1) {
    const unsigned int middle = (low + high) / 2;
    if (table.entries[middle].first_chunk <= chunk) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// Casts and scales all elements of one unit.
template <typename To, typename From, typename IntoWords, typename FromWords,
          typename C>
__device__ __forceinline__ IntoWords Changed(const FromWords& words, const C& change) {
  constexpr int kElements = sizeof(FromWords) / sizeof(typename From::Stored);
  typename From::Stored in[kElements];
  typename To::Stored out[kElements];
  IntoWords result;
  memcpy(in, &words, sizeof(in));
  RINGJAX_UNROLL
  for (int i = 0; i < kElements; ++i) out[i] = change.template Apply<To, From>(in[i]);
  memcpy(&result, out, sizeof(out));
  return result;
}

// Moves `n` elements, at most a chunk: in units of 16 tensor bytes if the tensor is
// aligned (the fused buffer always is), the rest one by one.
template <typename T, typename To, typename From>
__device__ __forceinline__ void MoveChunk(Address to, Address from, unsigned int n,
                                          bool aligned, const Change<T>& change,
                                          unsigned int thread) {
  using ToStored = typename To::Stored;
  using FromStored = typename From::Stored;
  constexpr unsigned int kUnit = 16 / sizeof(typename T::Stored);
  constexpr unsigned int kUnits = kPackChunkBytes / 16;
  constexpr unsigned int kInFlight = Change<T>::kInFlight;
  using IntoWords = typename WordsOf<kUnit * sizeof(ToStored)>::Type;
  using FromWords = typename WordsOf<kUnit * sizeof(FromStored)>::Type;

  const unsigned int units = aligned ? n / kUnit : 0;
  RINGJAX_ROLLED
  for (unsigned int first = 0; first < kUnits; first += kInFlight * kPackTeam) {
    FromWords words[kInFlight];
    RINGJAX_UNROLL
    for (unsigned int k = 0; k < kInFlight; ++k) {
      const unsigned int unit = thread + first + k * kPackTeam;
      if (unit < units) LoadWords(words[k], from + unit * sizeof(FromWords));
    }
    RINGJAX_UNROLL
    for (unsigned int k = 0; k < kInFlight; ++k) {
      const unsigned int unit = thread + first + k * kPackTeam;
      if (unit >= units) break;
      StoreWords(to + unit * sizeof(IntoWords),
                 Changed<To, From, IntoWords>(words[k], change));
    }
  }
  RINGJAX_ROLLED
  for (unsigned int i = units * kUnit + thread; i < n; i += kPackTeam) {
    const FromStored v = LoadAnywhere<FromStored>(from + i * sizeof(FromStored));
    StoreAnywhere<ToStored>(to + i * sizeof(ToStored),
                            change.template Apply<To, From>(v));
  }
}

template <int N>
__device__ __forceinline__ bool IsPoisoned(const PackTable<N>& table) {
  return table.poison != 0 &&
         *reinterpret_cast<const volatile unsigned int*>(table.poison) != 0;
}

// Moves elements between tensors of type T and the fused buffer of type W, which is not
// wider than T.
template <typename T, typename W, bool kPacking, int N>
__device__ __forceinline__ void Move(const PackTable<N>& table) {
  constexpr unsigned int kElements = kPackChunkBytes / sizeof(typename T::Stored);
  static_assert(sizeof(typename W::Stored) <= sizeof(typename T::Stored));
  const Change<T> change(table, !kPacking && IsPoisoned(table));
  const Team team{};
  for (unsigned int chunk = team.index; chunk < table.chunks; chunk += team.count) {
    const PackEntry& entry = table.entries[EntryOf(table, chunk)];
    const Address begin = static_cast<Address>(chunk - entry.first_chunk) * kElements;
    const Address left = entry.elements - begin;
    const unsigned int n =
        left < kElements ? static_cast<unsigned int>(left) : kElements;
    const Address tensor = entry.tensor + begin * sizeof(typename T::Stored);
    const Address fused = table.fused + static_cast<Address>(entry.offset16) * 16 +
                          begin * sizeof(typename W::Stored);
    const bool aligned = tensor % 16 == 0;
    if constexpr (kPacking) {
      MoveChunk<T, W, T>(fused, tensor, n, aligned, change, team.thread);
    } else {
      MoveChunk<T, T, W>(tensor, fused, n, aligned, change, team.thread);
    }
  }
}

template <typename T, typename W, int N>
__device__ __forceinline__ void Pack(const PackTable<N>& table) {
  Move<T, W, true>(table);
}
template <typename T, typename W, int N>
__device__ __forceinline__ void Unpack(const PackTable<N>& table) {
  Move<T, W, false>(table);
}

// Writes NaN to the first chunk of each tensor if the poison word is set.
template <typename T, typename, int N>
__device__ __forceinline__ void Seal(const PackTable<N>& table) {
  using Stored = typename T::Stored;
  constexpr unsigned int kElements = kPackChunkBytes / sizeof(Stored);
  if (!IsPoisoned(table)) return;
  const auto bits = T::kNan;
  Stored nan;
  static_assert(sizeof(nan) == sizeof(bits));
  memcpy(&nan, &bits, sizeof(nan));
  const Team team{};
  for (unsigned int e = team.index; e < table.count; e += team.count) {
    const PackEntry& entry = table.entries[e];
    for (unsigned int i = team.thread; i < kElements && i < entry.elements;
         i += kPackTeam)
      StoreAnywhere<Stored>(entry.tensor + i * sizeof(Stored), nan);
  }
}

// All kernels: X(name, function above, tensor type, wire type, capacity). Signed and
// unsigned integers differ only in scaling.
#define RINGJAX_BOTH_WAYS(X, t, T, w, W, N) \
  X(rj_pack_##t##_##w##_##N, Pack, T, W, N) \
  X(rj_unpack_##t##_##w##_##N, Unpack, T, W, N)
#define RINGJAX_FLOAT(X, t, T, N)     \
  RINGJAX_BOTH_WAYS(X, t, T, t, T, N) \
  X(rj_seal_##t##_##N, Seal, T, T, N)
#define RINGJAX_KERNELS_FOR(X, N)                      \
  RINGJAX_FLOAT(X, f16, Half, N)                       \
  RINGJAX_FLOAT(X, bf16, BFloat16, N)                  \
  RINGJAX_FLOAT(X, f32, Float, N)                      \
  RINGJAX_FLOAT(X, f64, Double, N)                     \
  RINGJAX_BOTH_WAYS(X, f32, Float, f16, Half, N)       \
  RINGJAX_BOTH_WAYS(X, f32, Float, bf16, BFloat16, N)  \
  RINGJAX_BOTH_WAYS(X, f64, Double, f16, Half, N)      \
  RINGJAX_BOTH_WAYS(X, f64, Double, bf16, BFloat16, N) \
  RINGJAX_BOTH_WAYS(X, i8, Int8, i8, Int8, N)          \
  RINGJAX_BOTH_WAYS(X, i32, Int32, i32, Int32, N)      \
  RINGJAX_BOTH_WAYS(X, i64, Int64, i64, Int64, N)      \
  RINGJAX_BOTH_WAYS(X, u8, UInt8, u8, UInt8, N)        \
  RINGJAX_BOTH_WAYS(X, u32, UInt32, u32, UInt32, N)    \
  RINGJAX_BOTH_WAYS(X, u64, UInt64, u64, UInt64, N)    \
  RINGJAX_BOTH_WAYS(X, bytes, Bytes, bytes, Bytes, N)
#define RINGJAX_KERNELS(X)    \
  RINGJAX_KERNELS_FOR(X, 168) \
  RINGJAX_KERNELS_FOR(X, 1360)

#ifdef __CUDACC__
// Three blocks on a multiprocessor leave 40 registers to a thread; a multiprocessor of
// sm_75 holds only two blocks.
#if __CUDA_ARCH__ >= 800
#define RINGJAX_BLOCKS 3
#else
#define RINGJAX_BLOCKS 2
#endif
#define RINGJAX_KERNEL(name, function, T, W, N)                              \
  extern "C" __global__ void __launch_bounds__(kPackThreads, RINGJAX_BLOCKS) \
      name(const __grid_constant__ PackTable<N> table) {                     \
    function<T, W>(table);                                                   \
  }
RINGJAX_KERNELS(RINGJAX_KERNEL)
#endif

}  // namespace ringjax::cuda
