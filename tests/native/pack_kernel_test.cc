// The CUDA kernels, compiled for the CPU, against base/reduce.h: random sizes, places
// and numbers of tensors, with guard bytes around each and in the gaps of the buffer.
//
// This finds wrong indices, offsets and bits. It does not test the compiler for GPUs,
// races (the kernels share no memory) or speed.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>

#include "base/reduce.h"
#include "check.h"
#include "cuda/cuda_on_cpu.h"

namespace ringjax {
namespace {

using cuda::FindOnCpu;
using cuda::LaunchOnCpu;
using Random = std::mt19937_64;

constexpr std::byte kGuard{0xa5};
constexpr size_t kGuardBytes = 48;
constexpr DType kBytes = DType::kBool;  // stands for the copying kernels

struct Types {
  DType tensor, wire;
};
constexpr Types kPairs[] = {
    {DType::kF16, DType::kF16},
    {DType::kBF16, DType::kBF16},
    {DType::kF32, DType::kF32},
    {DType::kF32, DType::kF16},
    {DType::kF32, DType::kBF16},
    {DType::kF64, DType::kF64},
    {DType::kF64, DType::kF16},
    {DType::kF64, DType::kBF16},
    {DType::kI8, DType::kI8},
    {DType::kI32, DType::kI32},
    {DType::kI64, DType::kI64},
    {DType::kU8, DType::kU8},
    {DType::kU32, DType::kU32},
    {DType::kU64, DType::kU64},
    {kBytes, kBytes},
};

std::string KernelName(const char* what, Types t, int capacity) {
  if (t.tensor == kBytes)
    return std::string("rj_") + what + "_bytes_bytes_" + std::to_string(capacity);
  return std::string("rj_") + what + "_" + std::string(Name(t.tensor)) + "_" +
         std::string(Name(t.wire)) + "_" + std::to_string(capacity);
}

size_t Below(Random& random, size_t limit) { return random() % limit; }

// Memory that begins at a multiple of 256 bytes.
class Arena {
 public:
  explicit Arena(size_t size) : bytes_(size + 256, kGuard) {}
  std::byte* data() {
    const auto at = reinterpret_cast<uintptr_t>(bytes_.data());
    return bytes_.data() + (256 - at % 256) % 256;
  }

 private:
  std::vector<std::byte> bytes_;
};

// Tensors at random addresses, and their offsets in a fused buffer.
struct Layout {
  Types types;
  std::vector<size_t> sizes;     // elements
  std::vector<size_t> at;        // byte offsets of the tensors
  std::vector<size_t> fused_at;  // byte offsets in the buffer
  size_t tensor_bytes = 0, fused_bytes = 0;

  Layout(Types t, std::vector<size_t> n, Random& random)
      : types(t), sizes(std::move(n)) {
    const size_t width = Width(t.tensor);
    // Mostly aligned as by XLA, but also to an element or not at all.
    const size_t steps[] = {256, 16, 16, width, 1};
    for (size_t elements : sizes) {
      const size_t step = steps[Below(random, 5)];
      tensor_bytes = (tensor_bytes + 255) / 256 * 256 + Below(random, 5) * step;
      at.push_back(tensor_bytes);
      tensor_bytes += elements * width + kGuardBytes;
      fused_at.push_back(fused_bytes);
      fused_bytes += (elements * Width(t.wire) + 15) / 16 * 16 + 16 * Below(random, 3);
    }
    fused_bytes += kGuardBytes;
  }
};

struct Launch {
  Arena* tensors;
  Arena* fused;
  double scale = 1.0;
  unsigned* poison = nullptr;
  unsigned blocks = 1;
};

template <int N>
void RunTable(const std::string& name, const Layout& layout, const Launch& launch) {
  auto table = std::make_unique<PackTable<N>>();
  const size_t chunk =
      kPackChunkBytes / std::max(Width(layout.types.tensor), Width(layout.types.wire));
  table->fused = reinterpret_cast<uintptr_t>(launch.fused->data());
  table->poison = reinterpret_cast<uintptr_t>(launch.poison);
  table->scale = launch.scale;
  for (size_t i = 0; i < layout.sizes.size(); ++i) {
    const auto tensor =
        reinterpret_cast<uintptr_t>(launch.tensors->data() + layout.at[i]);
    table->entries[table->count++] = {tensor, layout.sizes[i], table->chunks,
                                      static_cast<unsigned>(layout.fused_at[i] / 16)};
    table->chunks += static_cast<unsigned>((layout.sizes[i] + chunk - 1) / chunk);
  }
  const auto kernel = FindOnCpu(name);
  CHECK(kernel != nullptr);
  if (kernel != nullptr) LaunchOnCpu(kernel, table.get(), launch.blocks, kPackThreads);
}

void Run(const char* what, const Layout& layout, const Launch& launch) {
  if (layout.sizes.size() <= kPackSmall) {
    RunTable<kPackSmall>(KernelName(what, layout.types, kPackSmall), layout, launch);
  } else {
    RunTable<kPackLarge>(KernelName(what, layout.types, kPackLarge), layout, launch);
  }
}

// Fills with random bits, or with numbers that scaling and casting keep in range.
void FillRandom(DType t, std::byte* out, size_t n, Random& random) {
  const bool any_bits = !IsFloat(t) || Below(random, 3) == 0;
  for (size_t i = 0; i < n; ++i) {
    uint64_t bits = random();
    if (!any_bits) {
      const double v = std::ldexp(static_cast<double>(bits >> 11) - 0x1p52, -50);
      if (t == DType::kF16) bits = FloatToHalf(static_cast<float>(v));
      if (t == DType::kBF16) bits = FloatToBFloat16(static_cast<float>(v));
      if (t == DType::kF32) bits = BitsOf(static_cast<float>(v));
      if (t == DType::kF64) bits = std::bit_cast<uint64_t>(v);
    }
    // Twice this number is the least that is out of range.
    if (!IsFloat(t) && i % 16 == 0)
      bits = uint64_t{1} << (8 * Width(t) - 1 - i / 16 % 2);
    std::memcpy(out + i * Width(t), &bits, Width(t));
  }
}

bool IsNan(DType t, const std::byte* at) {
  uint16_t half;
  float single;
  double wide;
  std::memcpy(&half, at, 2);
  if (t == DType::kF16) return std::isnan(HalfToFloat(half));
  if (t == DType::kBF16) return std::isnan(BFloat16ToFloat(half));
  if (t == DType::kF32) return std::memcpy(&single, at, 4), std::isnan(single);
  return t == DType::kF64 && (std::memcpy(&wide, at, 8), std::isnan(wide));
}

// Checks that the elements have equal bits, or are NaN on both sides.
void CheckSame(DType t, const std::byte* found, const std::byte* expected, size_t n) {
  const size_t width = Width(t);
  for (size_t i = 0; i < n; ++i) {
    const std::byte *a = found + i * width, *b = expected + i * width;
    if (std::memcmp(a, b, width) == 0) continue;
    if (IsFloat(t) && IsNan(t, a) && IsNan(t, b)) continue;
    CHECK_EQ(i, n);  // the first element that differs
    return;
  }
}

// Checks all bytes that belong to no element.
void CheckGuards(Arena& arena, size_t total, const std::vector<size_t>& at,
                 const std::vector<size_t>& sizes, size_t width) {
  size_t position = 0;
  for (size_t i = 0; i <= at.size(); ++i) {
    const size_t end = i < at.size() ? at[i] : total;
    for (; position < end; ++position)
      if (arena.data()[position] != kGuard) {
        CHECK_EQ(position, total);  // the first byte that nobody may write
        return;
      }
    if (i < at.size()) position = at[i] + sizes[i] * width;
  }
}

Arithmetic Scaling(DType t, DType wire, double scale) {
  Arithmetic a;
  a.dtype = t == kBytes ? DType::kU8 : t;
  a.wire = t == kBytes ? DType::kU8 : wire;
  a.prescale = t == kBytes ? 1.0 : scale;
  return a;
}

unsigned SomeBlocks(Random& random) {
  return static_cast<unsigned>(1 + Below(random, 9));
}

// Packs and unpacks random values, and compares each with what the CPU path computes.
void RoundTrip(Types types, std::vector<size_t> sizes, double scale, Random& random) {
  const Layout layout(types, std::move(sizes), random);
  const auto [t, w] = types;
  Arena tensors(layout.tensor_bytes), fused(layout.fused_bytes);
  for (size_t i = 0; i < layout.sizes.size(); ++i)
    FillRandom(t, tensors.data() + layout.at[i], layout.sizes[i], random);
  Run("pack", layout, {&tensors, &fused, scale, nullptr, SomeBlocks(random)});
  CheckGuards(fused, layout.fused_bytes, layout.fused_at, layout.sizes, Width(w));

  Arena back(layout.tensor_bytes);
  unsigned healthy = 0;
  Run("unpack", layout, {&back, &fused, scale, &healthy, SomeBlocks(random)});
  CheckGuards(back, layout.tensor_bytes, layout.at, layout.sizes, Width(t));

  for (size_t i = 0; i < layout.sizes.size(); ++i) {
    const size_t n = layout.sizes[i];
    const std::byte* packed = fused.data() + layout.fused_at[i];
    std::vector<std::byte> wire(n * Width(w)), wide(n * Width(t)), out(n * Width(t));
    Encode(wire.data(), tensors.data() + layout.at[i], n, Scaling(t, w, scale), true);
    CheckSame(w, packed, wire.data(), n);
    Decode(wide.data(), packed, n, Scaling(t, w, 1.0));
    CopyScaled(out.data(), wide.data(), n, Scaling(t, t, scale), true, false);
    CheckSame(t, back.data() + layout.at[i], out.data(), n);
  }
}

std::vector<size_t> RandomSizes(size_t count, size_t largest, Random& random) {
  std::vector<size_t> sizes;
  for (size_t i = 0; i < count; ++i)
    sizes.push_back(Below(random, 4) == 0 ? Below(random, 3) : Below(random, largest));
  return sizes;
}

TEST(PackKernelsMatchTheCpuAroundChunks) {
  Random random(1);
  for (const Types types : kPairs) {
    const size_t chunk = kPackChunkBytes / Width(types.tensor);
    for (double scale : {1.0, 0.37, -3.0})
      RoundTrip(types,
                {0, 1, 7, chunk - 1, chunk, 0, 0, chunk + 1, 3 * chunk + 5, 16, 0},
                scale, random);
  }
}

TEST(PackKernelsMatchTheCpuAtRandom) {
  Random random(2);
  for (int round = 0; round < 8; ++round)
    for (const Types types : kPairs)
      RoundTrip(types, RandomSizes(1 + Below(random, 12), 9000, random),
                std::ldexp(1.0 + 0.1 * round, round - 4), random);
}

TEST(PackKernelsTakeAsManyTensorsAsTheTablesHold) {
  Random random(3);
  for (const Types types : kPairs)
    for (size_t count :
         {size_t{1}, size_t{kPackSmall}, size_t{kPackSmall + 1}, size_t{kPackLarge}})
      RoundTrip(types, RandomSizes(count, 60, random), 0.5, random);
}

TEST(PackKernelsSaturateIntegersAsTheCpuDoes) {
  Random random(4);
  for (const Types types : kPairs)
    if (!IsFloat(types.tensor))
      for (double scale : {1e30, -1e30, 1e-30, 2.0, HUGE_VAL, std::nan("")})
        RoundTrip(types, {1000, 33}, scale, random);
}

TEST(PackKernelsReadNothingOfAPoisonWordThatIsNotThere) {
  Random random(5);
  const Layout layout({DType::kF32, DType::kF32}, {5000}, random);
  Arena tensors(layout.tensor_bytes), fused(layout.fused_bytes);
  FillRandom(DType::kF32, fused.data(), 5000, random);
  Run("unpack", layout, {&tensors, &fused, 1.0, nullptr, 2});
  CheckSame(DType::kF32, tensors.data() + layout.at[0], fused.data(), 5000);
}

TEST(PoisonedUnpackingMakesFloatsNan) {
  Random random(6);
  for (const Types types : kPairs) {
    if (types.tensor == kBytes) continue;
    const Layout layout(types, {1, 40, 9001, 0, 3}, random);
    Arena tensors(layout.tensor_bytes), fused(layout.fused_bytes);
    std::fill_n(fused.data(), layout.fused_bytes, std::byte{0});
    unsigned poison = 1;
    Run("unpack", layout, {&tensors, &fused, 1.0, &poison, 3});
    CheckGuards(tensors, layout.tensor_bytes, layout.at, layout.sizes,
                Width(types.tensor));
    for (size_t i = 0; i < layout.sizes.size(); ++i)
      for (size_t j = 0; j < layout.sizes[i]; ++j) {
        const std::byte* at = tensors.data() + layout.at[i] + j * Width(types.tensor);
        // Integers have no NaN, so they are unpacked unchanged; here they are 0.
        CHECK(IsFloat(types.tensor) ? IsNan(types.tensor, at) : *at == std::byte{0});
      }
  }
}

TEST(PoisonDoesNotTouchWhatIsPacked) {
  Random random(7);
  const Layout layout({DType::kF32, DType::kBF16}, {3000}, random);
  Arena tensors(layout.tensor_bytes), fused(layout.fused_bytes);
  std::fill_n(tensors.data() + layout.at[0], 3000 * 4, std::byte{0});
  unsigned poison = 1;
  Run("pack", layout, {&tensors, &fused, 1.0, &poison, 1});
  CHECK(std::count(fused.data(), fused.data() + 6000, std::byte{0}) == 6000);
}

// Returns the number of NaN at the beginning. Checks that the rest has not changed.
size_t Sealed(DType t, const std::byte* tensor, const std::byte* before, size_t n) {
  size_t nan = 0;
  while (nan < n && IsNan(t, tensor + nan * Width(t))) ++nan;
  CHECK(std::memcmp(tensor + nan * Width(t), before + nan * Width(t),
                    (n - nan) * Width(t)) == 0);
  return nan;
}

TEST(SealingPoisonsTheFirstChunkOfEachTensor) {
  Random random(8);
  for (DType t : {DType::kF16, DType::kBF16, DType::kF32, DType::kF64})
    for (size_t count : {size_t{7}, size_t{kPackLarge}}) {
      const size_t chunk = kPackChunkBytes / Width(t);
      std::vector<size_t> sizes = RandomSizes(count, 50, random);
      sizes[2] = 3 * chunk;
      const Layout layout({t, t}, sizes, random);
      Arena tensors(layout.tensor_bytes), before(layout.tensor_bytes), none(0);
      for (Arena* arena : {&tensors, &before})
        for (size_t i = 0; i < count; ++i)
          std::fill_n(arena->data() + layout.at[i], sizes[i] * Width(t), std::byte{1});
      const std::string name =
          "rj_seal_" + std::string(Name(t)) + (count > kPackSmall ? "_1360" : "_168");
      for (unsigned poison : {0u, 1u}) {
        const Launch launch{&tensors, &none, 1.0, &poison, 3};
        if (count > kPackSmall) {
          RunTable<kPackLarge>(name, layout, launch);
        } else {
          RunTable<kPackSmall>(name, layout, launch);
        }
        CheckGuards(tensors, layout.tensor_bytes, layout.at, sizes, Width(t));
        for (size_t i = 0; i < count; ++i)
          CHECK_EQ(Sealed(t, tensors.data() + layout.at[i],
                          before.data() + layout.at[i], sizes[i]),
                   poison == 0 ? size_t{0} : std::min(sizes[i], chunk));
      }
    }
}

TEST(PackKernelsAreFoundByTheirNamesOnly) {
  for (const Types types : kPairs)
    for (int capacity : {kPackSmall, kPackLarge})
      for (const char* what : {"pack", "unpack"})
        CHECK(FindOnCpu(KernelName(what, types, capacity)) != nullptr);
  CHECK(FindOnCpu("rj_pack_f32_f32_161") == nullptr);
  CHECK(FindOnCpu("rj_seal_i32_168") == nullptr);
  CHECK(FindOnCpu("") == nullptr);
}

}  // namespace
}  // namespace ringjax
