// Fusion plans (device/fusion.h), which need no CUDA: which tensors are packed, and
// where, for every kind of call.
#include "device/fusion.h"

#include <algorithm>
#include <random>

#include "check.h"
#include "device/reduction.h"

namespace ringjax {
namespace {

using Random = std::mt19937_64;

constexpr uint64_t kMiB = 1 << 20;

Tensor MakeTensor(DType dtype, std::vector<int64_t> dims) {
  Tensor t;
  t.dtype = dtype;
  t.dims = std::move(dims);
  t.room = t.bytes();
  return t;
}

Call MakeCall(std::vector<Tensor> tensors, Collective op = Collective::kAllreduce) {
  Call call;
  call.op = op;
  call.tensors = std::move(tensors);
  return call;
}

FusionPlan PlanOf(const Call& call, FusionOptions options = {}, int size = 2) {
  Result<FusionPlan> plan = PlanFusion(call, size, options);
  CHECK(plan.ok());
  return plan.ok() ? std::move(plan.value()) : FusionPlan{};
}

bool IsPacked(const FusionPlan& plan, size_t tensor) {
  for (const Segment& s : plan.segments)
    for (const Packed& p : s.pieces)
      if (p.tensor == tensor) return true;
  return false;
}

// Checks the invariants of every fusion plan.
void CheckPlan(const Call& call, const FusionPlan& plan) {
  std::vector<int> seen(call.tensors.size());
  uint64_t end = 0, packed_bytes = 0;
  for (const Segment& s : plan.segments) {
    CHECK_EQ(s.offset, end);  // segments follow each other without gaps
    CHECK_EQ(s.bytes % Width(s.wire), 0u);
    CHECK_EQ(s.elements() * Width(s.wire), s.bytes);
    CHECK(!s.pieces.empty());
    CHECK(!IsComplex(s.dtype));
    CHECK(!IsComplex(s.wire));
    uint64_t next = s.offset;
    for (const Packed& p : s.pieces) {
      const Tensor& t = call.tensors[p.tensor];
      ++seen[p.tensor];
      CHECK_EQ(p.offset % 16, 0u);
      CHECK(p.offset >= next);
      CHECK(p.offset < next + 16);
      next = p.offset + p.elements * Width(s.wire);
      CHECK(next <= s.offset + s.bytes);
      CHECK_EQ(p.elements, Components(t));
      CHECK_EQ(p.elements * Width(s.dtype), t.bytes());
      CHECK(s.dtype == ComponentType(t.dtype));
      CHECK(s.wire == WireType(call, t));
      packed_bytes += t.bytes();
    }
    end = s.offset + s.bytes;
  }
  CHECK_EQ(end, plan.bytes);
  CHECK_EQ(plan.packed_bytes(), packed_bytes);
  for (size_t i : plan.in_place) {
    ++seen[i];
    CHECK(!Converts(call, call.tensors[i]));  // tensors in place are not converted
  }
  for (size_t i = 0; i < seen.size(); ++i)
    CHECK_EQ(seen[i], call.tensors[i].bytes() > 0 ? 1 : 0);
}

bool Same(const FusionPlan& a, const FusionPlan& b) {
  auto pieces = [](const Packed& x, const Packed& y) {
    return x.tensor == y.tensor && x.elements == y.elements && x.offset == y.offset;
  };
  auto segments = [&](const Segment& x, const Segment& y) {
    return x.dtype == y.dtype && x.wire == y.wire && x.offset == y.offset &&
           x.bytes == y.bytes &&
           std::equal(x.pieces.begin(), x.pieces.end(), y.pieces.begin(),
                      y.pieces.end(), pieces);
  };
  return a.bytes == b.bytes && a.in_place == b.in_place &&
         std::equal(a.segments.begin(), a.segments.end(), b.segments.begin(),
                    b.segments.end(), segments);
}

Call RandomCall(Random& random) {
  constexpr Collective kFusing[] = {Collective::kAllreduce, Collective::kBroadcast};
  std::vector<Tensor> tensors;
  for (size_t n = random() % 40; n > 0; --n) {
    std::vector<int64_t> dims;
    for (size_t d = random() % 4; d > 0; --d)
      dims.push_back(static_cast<int64_t>(random() % 40));
    tensors.push_back(MakeTensor(static_cast<DType>(random() % kDTypeCount), dims));
  }
  Call call = MakeCall(std::move(tensors), kFusing[random() % 2]);
  if (random() % 3 == 0) call.wire = static_cast<int>(DType::kBF16);
  if (random() % 3 == 0) call.prescale = 0.5;
  return call;
}

TEST(FusionPlansAreSoundAndEqualOnAllRanks) {
  Random random(42);
  int planned = 0;
  for (int round = 0; round < 3000; ++round) {
    Call call = RandomCall(random);
    FusionOptions options;
    options.mode = static_cast<Fusion>(random() % 3);
    options.small = random() % 3 == 0 ? 100 : kMiB;
    const int size = 1 + static_cast<int>(random() % 4);
    Result<FusionPlan> plan = PlanFusion(call, size, options);
    if (!plan.ok()) continue;
    ++planned;
    CheckPlan(call, plan.value());
    // Addresses, rooms and names may differ between ranks.
    Call elsewhere = call;
    for (Tensor& t : elsewhere.tensors) {
      t.in = reinterpret_cast<void*>(random());
      t.out = random() % 2 == 0 ? t.in : reinterpret_cast<void*>(random());
    }
    CHECK(Same(plan.value(), PlanOf(elsewhere, options, size)));
  }
  CHECK(planned > 1000);
}

TEST(FusionPacksOnlySmallTensors) {
  const int64_t limit = static_cast<int64_t>(kMiB / 4);
  const Call call =
      MakeCall({MakeTensor(DType::kF32, {3}), MakeTensor(DType::kF32, {limit}),
                MakeTensor(DType::kF32, {limit - 1}), MakeTensor(DType::kF32, {5, 7})});
  const FusionPlan plan = PlanOf(call);
  CheckPlan(call, plan);
  CHECK_EQ(plan.segments.size(), 1u);
  CHECK(plan.in_place == std::vector<size_t>{1});
  CHECK_EQ(plan.segments[0].pieces[0].offset, 0u);
  CHECK_EQ(plan.segments[0].pieces[1].offset, 16u);  // 12 bytes, rounded up
  CHECK_EQ(plan.segments[0].pieces[2].offset, kMiB + 16);
}

TEST(FusionModes) {
  const Call call =
      MakeCall({MakeTensor(DType::kF32, {3}), MakeTensor(DType::kF32, {1 << 20}),
                MakeTensor(DType::kF32, {0})});
  FusionOptions options;
  options.mode = Fusion::kPack;
  FusionPlan plan = PlanOf(call, options);
  CHECK(IsPacked(plan, 0));
  CHECK(IsPacked(plan, 1));
  CHECK(plan.in_place.empty());
  options.mode = Fusion::kGroup;
  plan = PlanOf(call, options);
  CHECK(plan.segments.empty());
  CHECK_EQ(plan.bytes, 0u);
  CHECK((plan.in_place == std::vector<size_t>{0, 1}));
}

TEST(FusionOfOneRankOnlyConverts) {
  Call call = MakeCall({MakeTensor(DType::kF32, {3}), MakeTensor(DType::kF32, {4})});
  CHECK(PlanOf(call, {}, 1).segments.empty());
  CHECK_EQ(PlanOf(call, {}, 1).in_place.size(), 2u);
  call.postscale = 3;
  CHECK(PlanOf(call, {}, 1).in_place.empty());
}

TEST(FusionDoesNotPackASingleTensor) {
  Call call = MakeCall({MakeTensor(DType::kF32, {3}), MakeTensor(DType::kI32, {3}),
                        MakeTensor(DType::kI32, {4})});
  FusionPlan plan = PlanOf(call);
  CheckPlan(call, plan);
  CHECK(plan.in_place == std::vector<size_t>{0});
  CHECK_EQ(plan.segments.size(), 1u);
  CHECK_EQ(plan.segments[0].offset, 0u);
  // In mode kPack all tensors are packed.
  FusionOptions options;
  options.mode = Fusion::kPack;
  CHECK(PlanOf(call, options).in_place.empty());
  // A tensor that is converted is packed.
  call.wire = static_cast<int>(DType::kF16);
  plan = PlanOf(call);
  CheckPlan(call, plan);
  CHECK(IsPacked(plan, 0));
}

TEST(FusionOfSegmentsByType) {
  Call call = MakeCall({MakeTensor(DType::kF32, {3}), MakeTensor(DType::kC64, {2}),
                        MakeTensor(DType::kF64, {3}), MakeTensor(DType::kC128, {}),
                        MakeTensor(DType::kBF16, {9}), MakeTensor(DType::kBF16, {1})});
  FusionPlan plan = PlanOf(call);
  CheckPlan(call, plan);
  CHECK_EQ(plan.segments.size(), 3u);  // a complex number is two floats
  CHECK_EQ(plan.segments[0].pieces[1].elements, 4u);
  CHECK(plan.segments[1].dtype == DType::kF64);
  CHECK_EQ(plan.segments[1].pieces[1].elements, 2u);
  // A wire dtype applies only to real floats that are wider.
  call.wire = static_cast<int>(DType::kBF16);
  plan = PlanOf(call);
  CheckPlan(call, plan);
  CHECK(WireType(call, call.tensors[0]) == DType::kBF16);
  CHECK(WireType(call, call.tensors[1]) == DType::kF32);
  CHECK(WireType(call, call.tensors[2]) == DType::kBF16);
  CHECK(WireType(call, call.tensors[3]) == DType::kF64);
  CHECK(WireType(call, call.tensors[4]) == DType::kBF16);
  CHECK(IsPacked(plan, 0));
  CHECK(IsPacked(plan, 2));
  CHECK(plan.in_place == (std::vector<size_t>{1, 3}));
  for (const Segment& s : plan.segments)
    CHECK_EQ(s.pieces.size(), s.dtype == DType::kBF16 ? 2u : 1u);
}

TEST(FusionPacksAveragesThatNcclWouldRound) {
  Call call = MakeCall(
      {MakeTensor(DType::kBF16, {4 << 20}), MakeTensor(DType::kF32, {4 << 20})});
  for (const int size : {1, 2, 3, 4, 5, 6, 7, 8}) {
    const bool rounds = size == 3 || (size > 4 && size < 8);
    for (const Fusion mode : {Fusion::kHybrid, Fusion::kGroup}) {
      call.reduce_op = ReduceOp::kAverage;
      const FusionPlan plan = PlanOf(call, {.mode = mode}, size);
      CheckPlan(call, plan);
      CHECK_EQ(IsPacked(plan, 0), rounds);
      CHECK(!IsPacked(plan, 1));
      CHECK(!IsPacked(PlanOf(call, {.mode = mode, .can_pack = false}, size), 0));
      call.reduce_op = ReduceOp::kSum;
      CHECK(!IsPacked(PlanOf(call, {.mode = mode}, size), 0));
    }
  }
}

TEST(FactorsOfAveragesGiveTheMean) {
  Call call = MakeCall({});
  call.prescale = 2, call.postscale = 5;
  for (const ReduceOp op : {ReduceOp::kAverage, ReduceOp::kSum})
    for (const DType wire : {DType::kF16, DType::kBF16, DType::kF32})
      for (const int size : {1, 2, 3, 6, 8}) {
        call.reduce_op = op;
        const Factors f = FactorsOf(call, wire, size);
        const bool last = AveragesLast(call, wire, size);
        CHECK_EQ(last,
                 op == ReduceOp::kAverage && wire != DType::kF32 && size % 3 == 0);
        CHECK(f.op == (last ? ReduceOp::kSum : op));
        const double off = f.before * f.after * (last ? size : 1) - 10;
        CHECK(off < 1e-12 && off > -1e-12);
        if (wire == DType::kF16 && last) CHECK(f.before * size <= call.prescale);
        if (wire != DType::kF16) CHECK_EQ(f.before, call.prescale);
      }
}

TEST(FusionOfBroadcastsNeverConverts) {
  Call call = MakeCall({MakeTensor(DType::kF32, {3}), MakeTensor(DType::kF32, {4}),
                        MakeTensor(DType::kI16, {5}), MakeTensor(DType::kI16, {6})},
                       Collective::kBroadcast);
  const FusionPlan plan = PlanOf(call);
  CheckPlan(call, plan);
  CHECK_EQ(plan.segments.size(), 2u);
  call.prescale = 2;  // ignored by a broadcast
  CHECK(Same(plan, PlanOf(call)));
}

TEST(FusionRefusesWhatTheKernelsCannotDo) {
  for (int d = 0; d < kDTypeCount; ++d) {
    const DType dtype = static_cast<DType>(d);
    Call call = MakeCall({MakeTensor(dtype, {3})});
    call.prescale = 0.5;
    const bool none =
        dtype == DType::kBool || dtype == DType::kI16 || dtype == DType::kU16;
    const Result<FusionPlan> plan = PlanFusion(call, 2, {});
    CHECK_EQ(plan.ok(), !none);
    if (!none) continue;
    CHECK(plan.status().code() == Code::kInvalidArgument);
    CHECK(plan.status().message().find(Name(dtype)) != std::string::npos);
  }
}

TEST(FusionWithoutDeviceCode) {
  FusionOptions options;
  options.can_pack = false;
  Call call = MakeCall({MakeTensor(DType::kF32, {3}), MakeTensor(DType::kF32, {4})});
  for (Fusion mode : {Fusion::kHybrid, Fusion::kPack, Fusion::kGroup}) {
    options.mode = mode;
    CHECK(PlanOf(call, options).segments.empty());
  }
  call.wire = static_cast<int>(DType::kF16);
  const Result<FusionPlan> plan = PlanFusion(call, 2, options);
  CHECK(plan.status().code() == Code::kFailedPrecondition);
  // A tensor without elements needs no conversion.
  call.tensors = {MakeTensor(DType::kF32, {0})};
  CHECK(PlanFusion(call, 2, options).ok());
}

TEST(FusionNames) {
  CHECK(FusionFromName("hybrid").value() == Fusion::kHybrid);
  CHECK(FusionFromName("pack").value() == Fusion::kPack);
  CHECK(FusionFromName("group").value() == Fusion::kGroup);
  CHECK(FusionFromName("Group").status().code() == Code::kInvalidArgument);
}

}  // namespace
}  // namespace ringjax
