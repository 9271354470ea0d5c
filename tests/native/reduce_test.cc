// Compares the arithmetic with a slow reference that shares no code with it. The
// reference rounds halves with ldexp and nearbyint, computes floats in double and
// rounds them (exact for one operation), and computes integers in 128 bits.
#include "base/reduce.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "base/cpu_level.h"
#include "check.h"

namespace ringjax {
namespace {

constexpr ReduceOp kOps[] = {ReduceOp::kSum, ReduceOp::kMin, ReduceOp::kMax,
                             ReduceOp::kProduct};
constexpr size_t kSizes[] = {0, 1, 2, 7, 16, 33, 64, 127, 1000};

// Rounds to a binary format with `digits` of precision and least exponent `least`.
double RoundTo(double v, int digits, int least, double highest) {
  if (v == 0 || !std::isfinite(v)) return v;
  const int exponent = std::max(std::ilogb(v), least) - (digits - 1);
  const double r = std::ldexp(std::nearbyint(std::ldexp(v, -exponent)), exponent);
  return std::fabs(r) > highest ? std::copysign(HUGE_VAL, v) : r;
}

double Rounded(DType t, double v) {
  if (t == DType::kF16) return RoundTo(v, 11, -14, 65504.0);
  if (t == DType::kBF16) return RoundTo(v, 8, -126, std::ldexp(255.0, 120));
  return t == DType::kF32 ? static_cast<double>(static_cast<float>(v)) : v;
}

double FromHalfBits(DType t, uint16_t bits) {
  const int mantissa_bits = t == DType::kF16 ? 10 : 7;
  const int bias = t == DType::kF16 ? 15 : 127;
  const int all_ones = (1 << (15 - mantissa_bits)) - 1;
  const int exponent = (bits & 0x7fff) >> mantissa_bits;
  const int mantissa = bits & ((1 << mantissa_bits) - 1);
  double v;
  if (exponent == all_ones) {
    v = mantissa == 0 ? HUGE_VAL : std::nan("");
  } else {
    const int implied = exponent == 0 ? 0 : 1 << mantissa_bits;
    v = std::ldexp(implied + mantissa, std::max(exponent, 1) - bias - mantissa_bits);
  }
  return bits & 0x8000 ? -v : v;
}

double Read(DType t, const std::byte* at) {
  uint16_t h;
  float f;
  double d;
  if (t == DType::kF32) return std::memcpy(&f, at, 4), static_cast<double>(f);
  if (t == DType::kF64) return std::memcpy(&d, at, 8), d;
  return std::memcpy(&h, at, 2), FromHalfBits(t, h);
}

bool SameValue(double a, double b) {
  if (std::isnan(a) || std::isnan(b)) return std::isnan(a) && std::isnan(b);
  return a == b && std::signbit(a) == std::signbit(b);
}

double ReferenceOp(ReduceOp op, double a, double b) {
  if (op == ReduceOp::kSum) return a + b;
  if (op == ReduceOp::kProduct) return a * b;
  if (std::isnan(a) || std::isnan(b)) return std::nan("");
  const bool minimum = op == ReduceOp::kMin;
  if (a == b) return (minimum == std::signbit(a)) ? a : b;
  return (a < b) == minimum ? a : b;
}

// Computes the reference for Combine on one float element.
double ReferenceCombine(double own, double received, const Arithmetic& a, bool first,
                        bool last) {
  const DType computed = a.dtype == DType::kF64 ? DType::kF64 : DType::kF32;
  const auto round = [&](double v) { return Rounded(computed, v); };
  double v = first ? round(own * round(a.prescale)) : own;
  v = round(ReferenceOp(a.op, v, received));
  if (last) {
    v = round(v * round(a.postscale));
    v = round(v / static_cast<double>(a.divisor));
    if (a.compressed()) v = Rounded(a.wire, v);
  }
  return Rounded(a.dtype, v);
}

// Bytes at any alignment, with a margin that must stay as it was.
class Buffer {
 public:
  Buffer(size_t bytes, size_t offset) : bytes_(bytes), offset_(offset) {
    memory_.assign(bytes + 2 * kMargin, std::byte{0xa5});
  }
  std::byte* data() { return memory_.data() + kMargin + offset_; }
  bool MarginIntact() const {
    for (size_t i = 0; i < memory_.size(); ++i)
      if ((i < kMargin + offset_ || i >= kMargin + offset_ + bytes_) &&
          memory_[i] != std::byte{0xa5})
        return false;
    return true;
  }

 private:
  static constexpr size_t kMargin = 64;
  size_t bytes_, offset_;
  std::vector<std::byte> memory_;
};

std::mt19937_64 random_bits(20240229);

// Fills with ordinary numbers, and with random bits at every fifth element.
void FillFloats(DType t, Buffer* b, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    std::byte* at = b->data() + i * Width(t);
    const uint64_t bits = random_bits();
    const double d = static_cast<double>(static_cast<int64_t>(bits)) / 1e18;
    const float f = static_cast<float>(d);
    uint32_t float_bits;
    std::memcpy(&float_bits, &f, 4);
    if (bits % 5 == 0) {
      std::memcpy(at, &bits, Width(t));
    } else if (t == DType::kF64) {
      std::memcpy(at, &d, 8);
    } else if (t == DType::kF32) {
      std::memcpy(at, &f, 4);
    } else {
      const uint16_t h = static_cast<uint16_t>(
          t == DType::kBF16 ? float_bits >> 16 : 0x2000 + bits % 0x2800);
      std::memcpy(at, &h, 2);
    }
  }
}

void CheckFloats(const Arithmetic& a, bool first, bool last, size_t n, size_t offset) {
  const size_t width = Width(a.dtype), wire = Width(a.wire);
  Buffer own(n * width, offset), received(n * wire, (offset * 3) % 8);
  Buffer out(n * width, (offset * 5) % 16);
  FillFloats(a.dtype, &own, n);
  FillFloats(a.wire, &received, n);
  Combine(out.data(), own.data(), received.data(), n, a, first, last);
  for (size_t i = 0; i < n; ++i) {
    const double x = Read(a.dtype, own.data() + i * width);
    const double y = Read(a.wire, received.data() + i * wire);
    const double want = ReferenceCombine(x, y, a, first, last);
    const double got = Read(a.dtype, out.data() + i * width);
    if (SameValue(got, want)) continue;
    std::ostringstream what;
    what << Name(a.dtype) << " wire " << Name(a.wire) << " " << Name(a.op) << " first "
         << first << " last " << last << ": " << x << " and " << y << " gave " << got
         << ", expected " << want;
    testing::Fail(__FILE__, __LINE__, what.str());
  }
  CHECK(out.MarginIntact() && own.MarginIntact() && received.MarginIntact());
  Combine(own.data(), own.data(), received.data(), n, a, first, last);  // in place
  for (size_t i = 0; i < n; ++i)
    CHECK(SameValue(Read(a.dtype, own.data() + i * width),
                    Read(a.dtype, out.data() + i * width)));
  CHECK(own.MarginIntact());
}

std::vector<Arithmetic> FloatArithmetics() {
  std::vector<Arithmetic> all;
  for (DType t : {DType::kF16, DType::kBF16, DType::kF32, DType::kF64})
    for (DType wire : {t, DType::kF16, DType::kBF16}) {
      if (wire != t && t != DType::kF32 && t != DType::kF64) continue;
      for (ReduceOp op : kOps) {
        all.push_back({t, wire, op, 1.0, 1.0, 1});
        all.push_back({t, wire, op, 1.0, 1.0, 3});
        all.push_back({t, wire, op, 0.3, 1.7, 7});
      }
    }
  return all;
}

TEST(ReduceFloats) {
  size_t turn = 0;
  for (CpuLevel level : {CpuLevel::kBase, CpuLevel::kV3, CpuLevel::kV4}) {
    const LevelForTests forced(level);
    for (const Arithmetic& a : FloatArithmetics())
      for (size_t n : kSizes)
        for (int ends = 0; ends < 4; ++ends)
          CheckFloats(a, ends & 1, ends & 2, n, turn++ % 9);
  }
}

// The decoded value must be the value with which the sender computes.
TEST(EncodeDecodeAndCopy) {
  for (const Arithmetic& a : FloatArithmetics()) {
    const DType computed = a.dtype == DType::kF64 ? DType::kF64 : DType::kF32;
    const size_t n = 77, width = Width(a.dtype), wire = Width(a.wire);
    Buffer own(n * width, 3), sent(n * wire, 1), got(n * width, 5), copy(n * width, 0);
    FillFloats(a.dtype, &own, n);
    for (bool first : {false, true}) {
      Encode(sent.data(), own.data(), n, a, first);
      Decode(got.data(), sent.data(), n, a);
      CopyScaled(copy.data(), own.data(), n, a, first, true);
      for (size_t i = 0; i < n; ++i) {
        const double x = Read(a.dtype, own.data() + i * width);
        const double scale = Rounded(computed, a.prescale);
        const double scaled = first ? Rounded(computed, x * scale) : x;
        const double on_wire = Rounded(a.wire, scaled);
        CHECK(SameValue(Read(a.wire, sent.data() + i * wire), on_wire));
        CHECK(SameValue(Read(a.dtype, got.data() + i * width), on_wire));
        double v = Rounded(computed, scaled * Rounded(computed, a.postscale));
        v = Rounded(a.wire, Rounded(computed, v / static_cast<double>(a.divisor)));
        CHECK(SameValue(Read(a.dtype, copy.data() + i * width), v));
      }
      CHECK_EQ(IsPlain(a, first), a.wire == a.dtype && !(first && a.prescale != 1.0));
    }
    CHECK(sent.MarginIntact() && got.MarginIntact() && copy.MarginIntact());
  }
}

TEST(EveryHalfWidensAndComesBack) {
  std::vector<uint16_t> all(1 << 16), back(1 << 16);
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
  for (DType wire : {DType::kF16, DType::kBF16}) {
    const Arithmetic a{DType::kF32, wire};
    std::vector<float> wide(1 << 16);
    Decode(wide.data(), all.data(), all.size(), a);
    Encode(back.data(), wide.data(), wide.size(), a, false);
    for (size_t i = 0; i < all.size(); ++i) {
      const double want = FromHalfBits(wire, all[i]);
      CHECK(SameValue(wide[i], want));
      CHECK(std::isnan(want) ? std::isnan(FromHalfBits(wire, back[i]))
                             : back[i] == all[i]);
    }
  }
}

// Tests ties between two halves, and the doubles next to the ties, for which a first
// rounding to float would give a wrong result.
TEST(NarrowingRoundsOnceAndToEven) {
  for (DType wire : {DType::kF16, DType::kBF16}) {
    std::vector<double> doubles;
    for (uint32_t h = 0; h < 0x7bff; ++h) {
      const double low = FromHalfBits(wire, static_cast<uint16_t>(h));
      const double high = FromHalfBits(wire, static_cast<uint16_t>(h + 1));
      const double tie = low + (high - low) / 2;
      for (double v : {tie, std::nextafter(tie, 0.0), std::nextafter(tie, HUGE_VAL)}) {
        doubles.push_back(v);
        doubles.push_back(-v);
      }
    }
    std::vector<float> floats(doubles.begin(), doubles.end());
    std::vector<uint16_t> from_double(doubles.size()), from_float(doubles.size());
    Encode(from_double.data(), doubles.data(), doubles.size(), {DType::kF64, wire},
           false);
    Encode(from_float.data(), floats.data(), floats.size(), {DType::kF32, wire}, false);
    for (size_t i = 0; i < doubles.size(); ++i) {
      CHECK(SameValue(FromHalfBits(wire, from_double[i]), Rounded(wire, doubles[i])));
      CHECK(SameValue(FromHalfBits(wire, from_float[i]), Rounded(wire, floats[i])));
    }
  }
}

// Includes NaNs whose payload has only bits that narrowing cuts off.
TEST(NarrowingKeepsNaN) {
  for (DType wire : {DType::kF16, DType::kBF16})
    for (uint32_t bits : {0x7f800001u, 0xff800001u, 0x7fc00000u, 0xffffffffu}) {
      float f;
      std::memcpy(&f, &bits, 4);
      uint16_t half;
      Encode(&half, &f, 1, {DType::kF32, wire}, false);
      CHECK(std::isnan(FromHalfBits(wire, half)));
      CHECK_EQ(half >> 15, static_cast<int>(bits >> 31));
    }
}

TEST(MinAndMaxAgreeWhicheverSideIsOwn) {
  const float nan = std::nanf(""), zero = 0.0f;
  const float a[] = {zero, -zero, nan, 1, -INFINITY, nan};
  const float b[] = {-zero, zero, 1, nan, INFINITY, -INFINITY};
  for (ReduceOp op : {ReduceOp::kMin, ReduceOp::kMax}) {
    const Arithmetic arithmetic{DType::kF32, DType::kF32, op};
    float x[6], y[6];
    Combine(x, a, b, 6, arithmetic, true, true);
    Combine(y, b, a, 6, arithmetic, true, true);
    for (int i = 0; i < 6; ++i) CHECK(SameValue(x[i], y[i]));
    CHECK_EQ(std::signbit(x[0]), op == ReduceOp::kMin);
    CHECK(std::isnan(x[2]) && std::isnan(x[3]) && std::isnan(x[5]));
  }
}

using Wide = __int128;

Wide ReadInteger(DType t, const std::byte* at) {
  uint64_t bits = 0;
  std::memcpy(&bits, at, Width(t));
  if (t > DType::kI64 || t == DType::kBool) return bits;
  const int shift = 64 - 8 * static_cast<int>(Width(t));
  return static_cast<int64_t>(bits << shift) >> shift;
}

bool IsSigned(DType t) { return t >= DType::kI8 && t <= DType::kI64; }
Wide Highest(DType t) {
  return (Wide{1} << (8 * Width(t) - (IsSigned(t) ? 1 : 0))) - 1;
}
Wide Lowest(DType t) { return IsSigned(t) ? -Highest(t) - 1 : 0; }

Wide Wrapped(DType t, Wide v) {
  const Wide range = Wide{1} << (8 * Width(t));
  v = ((v % range) + range) % range;
  return v > Highest(t) ? v - range : v;
}

Wide ScaledInteger(DType t, Wide v, double factor) {
  if (factor == 1.0) return v;
  const double scaled = std::trunc(static_cast<double>(v) * factor);
  if (scaled >= static_cast<double>(Highest(t))) return Highest(t);
  if (scaled <= static_cast<double>(Lowest(t))) return Lowest(t);
  return static_cast<Wide>(scaled);
}

Wide ReferenceInteger(Wide own, Wide received, const Arithmetic& a, bool first,
                      bool last) {
  const DType t = a.dtype;
  Wide v = first ? ScaledInteger(t, own, a.prescale) : own;
  switch (a.op) {
    case ReduceOp::kMin:
      v = std::min(v, received);
      break;
    case ReduceOp::kMax:
      v = std::max(v, received);
      break;
    case ReduceOp::kProduct:
      // Modulo 2^64 first, since 128 bits cannot hold every intermediate value here.
      v = Wrapped(t, static_cast<Wide>(static_cast<uint64_t>(v) *
                                       static_cast<uint64_t>(received)));
      break;
    default:
      v = Wrapped(t, v + received);
  }
  return last ? ScaledInteger(t, v, a.postscale) / a.divisor : v;
}

void CheckIntegers(const Arithmetic& a, bool first, bool last) {
  const DType t = a.dtype;
  const size_t n = 1031, width = Width(t);
  Buffer own(n * width, 1), received(n * width, 3), out(n * width, 5);
  for (size_t i = 0; i < n * width; ++i) {
    own.data()[i] = static_cast<std::byte>(random_bits());
    received.data()[i] = static_cast<std::byte>(random_bits());
  }
  Combine(out.data(), own.data(), received.data(), n, a, first, last);
  for (size_t at = 0; at < n * width; at += width) {
    const Wide x = ReadInteger(t, own.data() + at);
    const Wide y = ReadInteger(t, received.data() + at);
    CHECK(ReadInteger(t, out.data() + at) == ReferenceInteger(x, y, a, first, last));
  }
  Combine(own.data(), own.data(), received.data(), n, a, first, last);
  CHECK(std::memcmp(own.data(), out.data(), n * width) == 0);
  CHECK(out.MarginIntact() && own.MarginIntact());
}

TEST(ReduceIntegers) {
  for (int type = 1; type <= static_cast<int>(DType::kU64); ++type)
    for (ReduceOp op : kOps)
      for (int ends = 0; ends < 4; ++ends) {
        const DType t = static_cast<DType>(type);
        CheckIntegers({t, t, op, 1.0, 1.0, 1}, ends & 1, ends & 2);
        CheckIntegers({t, t, op, 1.0, 1.0, 3}, ends & 1, ends & 2);
        CheckIntegers({t, t, op, 0.5, 1.0, 1}, ends & 1, ends & 2);
        CheckIntegers({t, t, op, -2.5, 1e3, 7}, ends & 1, ends & 2);
      }
}

// The least double that is out of range is the limit plus one.
TEST(IntegersOf64BitsSaturateAtExactlyTheLimit) {
  for (const int64_t sign : {1, -1}) {
    const int64_t half = sign * (int64_t{1} << 62);
    const int64_t below = sign * ((int64_t{1} << 62) - 512);  // doubled, still exact
    const int64_t in[] = {half, below};
    int64_t out[2];
    CopyScaled(out, in, 2, {DType::kI64, DType::kI64, ReduceOp::kSum, 2.0}, true, true);
    const auto limit = sign > 0 ? std::numeric_limits<int64_t>::max()
                                : std::numeric_limits<int64_t>::lowest();
    CHECK_EQ(out[0], limit);
    CHECK_EQ(out[1], 2 * below);
  }
  const uint64_t in[] = {uint64_t{1} << 63, (uint64_t{1} << 63) - 1024};
  uint64_t out[2];
  CopyScaled(out, in, 2, {DType::kU64, DType::kU64, ReduceOp::kSum, 2.0}, true, true);
  CHECK_EQ(out[0], std::numeric_limits<uint64_t>::max());
  CHECK_EQ(out[1], 2 * in[1]);
}

TEST(ReduceBools) {
  const uint8_t a[] = {0, 0, 1, 1}, b[] = {0, 1, 0, 1};
  for (ReduceOp op : kOps) {
    uint8_t out[4];
    Combine(out, a, b, 4, {DType::kBool, DType::kBool, op}, true, true);
    const bool any = op == ReduceOp::kSum || op == ReduceOp::kMax;
    for (int i = 0; i < 4; ++i) CHECK_EQ(int{out[i]}, any ? a[i] | b[i] : a[i] & b[i]);
  }
}

template <typename T>
void CheckComplex(DType t) {
  const size_t n = 37;
  std::vector<T> own(2 * n), received(2 * n), out(2 * n);
  for (T& v : own) v = static_cast<T>(static_cast<int>(random_bits() % 41)) - 20;
  for (T& v : received) v = static_cast<T>(static_cast<int>(random_bits() % 41)) - 20;
  for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kProduct}) {
    // Powers of two and small integers: every result is exact.
    const Arithmetic a{t, t, op, 0.5, 4.0, 2};
    Combine(out.data(), own.data(), received.data(), n, a, true, true);
    for (size_t i = 0; i < n; ++i) {
      const T re = own[2 * i] / 2, im = own[2 * i + 1] / 2;
      const T x = received[2 * i], y = received[2 * i + 1];
      const bool sum = op == ReduceOp::kSum;
      CHECK_EQ(out[2 * i], 2 * (sum ? re + x : re * x - im * y));
      CHECK_EQ(out[2 * i + 1], 2 * (sum ? im + y : re * y + im * x));
    }
  }
}

TEST(ReduceComplex) {
  CheckComplex<float>(DType::kC64);
  CheckComplex<double>(DType::kC128);
}

}  // namespace
}  // namespace ringjax
