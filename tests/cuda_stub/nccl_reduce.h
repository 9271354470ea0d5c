// The arithmetic of the NCCL stub. It reduces in the order of the ranks and rounds each
// step to the type. A ring of NCCL also rounds each step, but has another order.
//
// The stub rounds where NCCL does: AVG multiplies each float input by 1/n before the
// sum, but divides the sum of integers and rounds it toward zero. MIN and MAX of floats
// ignore a NaN.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "base/convert.h"
#include "device/nccl.h"

namespace ringjax::nccl {

inline size_t SizeOf(DataType type) {
  constexpr size_t kSizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
  return kSizes[type];
}

struct Half {
  uint16_t bits;
  float Widen() const { return HalfToFloat(bits); }
  static Half Narrow(float v) { return {FloatToHalf(v)}; }
};

struct BFloat {
  uint16_t bits;
  float Widen() const { return BFloat16ToFloat(bits); }
  static BFloat Narrow(float v) { return {FloatToBFloat16(v)}; }
};

template <typename T>
auto Widen(T v) {
  if constexpr (std::is_class_v<T>)
    return v.Widen();
  else
    return v;
}

template <typename T, typename V>
T Narrow(V v) {
  if constexpr (std::is_class_v<T>)
    return T::Narrow(v);
  else
    return static_cast<T>(v);
}

// Integers wrap around instead of overflowing.
template <typename V>
V Add(V a, V b) {
  if constexpr (std::is_integral_v<V>)
    return static_cast<V>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
  else
    return a + b;
}

template <typename V>
V Multiply(V a, V b) {
  if constexpr (std::is_integral_v<V>)
    return static_cast<V>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
  else
    return a * b;
}

template <typename V>
V Greater(V a, V b) {
  if constexpr (std::is_integral_v<V>)
    return a > b ? a : b;
  else
    return std::fmax(a, b);
}

template <typename V>
V Smaller(V a, V b) {
  if constexpr (std::is_integral_v<V>)
    return a < b ? a : b;
  else
    return std::fmin(a, b);
}

template <typename T>
class Reducer {
  using V = decltype(Widen(T{}));
  static constexpr bool kFloating = !std::is_integral_v<T>;

 public:
  Reducer(RedOp op, int ranks) : op_(op), ranks_(ranks) {
    if constexpr (kFloating)
      share_ = Widen(Narrow<T>(static_cast<V>(1) / static_cast<V>(ranks)));
  }

  // Sets total = input for the first rank and total = total op input for the others;
  // divides after the last rank.
  void Take(int rank, T* total, const T* input, size_t count) const {
    for (size_t i = 0; i < count; i++) {
      V v = Widen(input[i]);
      if constexpr (kFloating)
        if (op_ == kAvg) v = Widen(Narrow<T>(v * share_));
      if (rank > 0) v = Widen(Narrow<T>(Combine(Widen(total[i]), v)));
      if constexpr (!kFloating)
        if (op_ == kAvg && rank == ranks_ - 1) v = Divided(v);
      total[i] = Narrow<T>(v);
    }
  }

 private:
  V Combine(V a, V b) const {
    switch (op_) {
      case kProd:
        return Multiply(a, b);
      case kMax:
        return Greater(a, b);
      case kMin:
        return Smaller(a, b);
      default:
        return Add(a, b);
    }
  }

  // Computes in 64 bits, in which every quotient is in range.
  V Divided(V v) const {
    if constexpr (std::is_signed_v<V>)
      return static_cast<V>(static_cast<int64_t>(v) / ranks_);
    else
      return static_cast<V>(static_cast<uint64_t>(v) / static_cast<uint64_t>(ranks_));
  }

  RedOp op_;
  int ranks_;
  V share_{};
};

// Reduces the input of `rank` into `total`. Call it for all ranks from 0 on.
inline void Reduce(DataType type, RedOp op, int ranks, int rank, std::byte* total,
                   const std::byte* input, size_t count) {
  const auto run = [&]<typename T>(T) {
    Reducer<T>(op, ranks).Take(rank, reinterpret_cast<T*>(total),
                               reinterpret_cast<const T*>(input), count);
  };
  switch (type) {
    case kInt8:
      return run(int8_t{});
    case kUint8:
      return run(uint8_t{});
    case kInt32:
      return run(int32_t{});
    case kUint32:
      return run(uint32_t{});
    case kInt64:
      return run(int64_t{});
    case kUint64:
      return run(uint64_t{});
    case kFloat16:
      return run(Half{});
    case kFloat32:
      return run(float{});
    case kFloat64:
      return run(double{});
    case kBfloat16:
      return run(BFloat{});
  }
}

}  // namespace ringjax::nccl
