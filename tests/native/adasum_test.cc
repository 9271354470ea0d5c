// Adasum against its definition, computed pair by pair in double on whole tensors; its
// results for equal, orthogonal and scaled vectors; and the calls that it refuses.
#include <cmath>
#include <cstring>
#include <random>

#include "base/convert.h"
#include "check.h"
#include "local_world.h"

namespace ringjax {
namespace {

using Vector = std::vector<double>;

template <typename T>
void Put(std::byte* to, T value) {
  std::memcpy(to, &value, sizeof value);
}
template <typename T>
T Get(const std::byte* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

void Store(DType type, double v, std::byte* to) {
  if (type == DType::kF16) return Put(to, DoubleToHalf(v));
  if (type == DType::kBF16) return Put(to, DoubleToBFloat16(v));
  if (type == DType::kF32) return Put(to, static_cast<float>(v));
  Put(to, v);
}

double Load(DType type, const std::byte* from) {
  if (type == DType::kF16) return HalfToFloat(Get<uint16_t>(from));
  if (type == DType::kBF16) return BFloat16ToFloat(Get<uint16_t>(from));
  if (type == DType::kF32) return Get<float>(from);
  return Get<double>(from);
}

// Returns the allowed error relative to the largest number. Every level rounds once.
double Tolerance(DType type) {
  if (type == DType::kF16) return 4e-3;
  if (type == DType::kBF16) return 3e-2;
  return type == DType::kF32 ? 1e-6 : 1e-14;
}

double Dot(const Vector& a, const Vector& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

Vector Pair(const Vector& a, const Vector& b) {
  const double dot = Dot(a, b), aa = Dot(a, a), bb = Dot(b, b);
  const double wa = aa == 0 ? 1 : 1 - dot / (2 * aa);
  const double wb = bb == 0 ? 1 : 1 - dot / (2 * bb);
  Vector out(a.size());
  for (size_t i = 0; i < a.size(); ++i) out[i] = wa * a[i] + wb * b[i];
  return out;
}

// Computes the definition of Adasum. by_rank[r] is one tensor of rank r.
Vector Expected(const std::vector<Vector>& by_rank) {
  if (by_rank.size() == 1) return by_rank[0];
  const auto middle = by_rank.begin() + static_cast<long>(by_rank.size() / 2);
  return Pair(Expected({by_rank.begin(), middle}), Expected({middle, by_rank.end()}));
}

struct Described {
  DType type;
  size_t elements;
};

// The tensors of all ranks for one call, as bytes in memory and as numbers.
class Job {
 public:
  Job(int ranks, std::vector<Described> tensors, bool in_place = true)
      : tensors_(std::move(tensors)),
        in_place_(in_place),
        in_(ranks, std::vector<std::vector<std::byte>>(tensors_.size())),
        out_(in_) {
    for (int r = 0; r < ranks; ++r)
      for (size_t t = 0; t < tensors_.size(); ++t) {
        const size_t bytes = tensors_[t].elements * Width(tensors_[t].type);
        in_[r][t].resize(bytes);
        // Results outside the input must overwrite this pattern.
        out_[r][t].assign(bytes, std::byte{0x5a});
      }
  }

  void Set(int rank, size_t t, size_t i, double value) {
    Store(tensors_[t].type, value, At(&in_, rank, t, i));
  }
  double Out(int rank, size_t t, size_t i) {
    return Load(tensors_[t].type, At(in_place_ ? &in_ : &out_, rank, t, i));
  }
  void Fill(uint32_t seed) {
    std::mt19937 random(seed);
    std::uniform_real_distribution<double> draw(-1, 1);
    for (int r = 0; r < ranks(); ++r)
      for (size_t t = 0; t < tensors_.size(); ++t)
        for (size_t i = 0; i < tensors_[t].elements; ++i)
          Set(r, t, i, draw(random) + 0.3);
    Keep();
  }
  // Stores the present numbers, which are rounded to their types.
  void Keep() {
    kept_.assign(tensors_.size(), std::vector<Vector>(ranks()));
    for (size_t t = 0; t < tensors_.size(); ++t)
      for (int r = 0; r < ranks(); ++r)
        for (size_t i = 0; i < tensors_[t].elements; ++i)
          kept_[t][r].push_back(Load(tensors_[t].type, At(&in_, r, t, i)));
  }

  Call For(int rank) {
    Call call;
    call.reduce_op = ReduceOp::kAdasum;
    call.name = "grads";
    for (size_t t = 0; t < tensors_.size(); ++t) {
      auto& in = in_[rank][t];
      auto& out = in_place_ ? in : out_[rank][t];
      const auto n = static_cast<int64_t>(tensors_[t].elements);
      call.tensors.push_back(
          {tensors_[t].type, {n}, in.data(), out.data(), out.size()});
    }
    return call;
  }
  void Run(World* world) {
    world->Each([this](Communicator& c) {
      const Status status = c.Run(For(c.rank()));
      CHECK(status.ok());
    });
  }

  void Check() {
    for (size_t t = 0; t < tensors_.size(); ++t) {
      const Vector want = Expected(kept_[t]);
      double largest = 0;
      for (double v : want) largest = std::max(largest, std::abs(v));
      const double off = Tolerance(tensors_[t].type) * std::max(largest, 1.0);
      for (size_t i = 0; i < want.size(); ++i)
        if (!(std::abs(Out(0, t, i) - want[i]) <= off)) CHECK_EQ(Out(0, t, i), want[i]);
    }
    CheckBits();
  }
  void CheckBits() {
    auto& results = in_place_ ? in_ : out_;
    for (int r = 1; r < ranks(); ++r) CHECK(results[r] == results[0]);
  }

  int ranks() const { return static_cast<int>(in_.size()); }

 private:
  using Memories = std::vector<std::vector<std::vector<std::byte>>>;

  std::byte* At(Memories* memories, int rank, size_t t, size_t i) {
    return (*memories)[rank][t].data() + i * Width(tensors_[t].type);
  }

  std::vector<Described> tensors_;
  bool in_place_;
  Memories in_, out_;                      // by rank and tensor
  std::vector<std::vector<Vector>> kept_;  // by tensor and rank
};

std::vector<int> OneHost(int size) { return std::vector<int>(size, 0); }

TEST(AdasumOfEveryTypeLengthAndSize) {
  for (int size : {1, 2, 4, 8}) {
    World world(OneHost(size));
    for (DType type : kFloats)
      for (size_t n : {0, 1, 2, 3, 5, 1000})
        for (bool in_place : {true, false}) {
          Job job(size, {{type, n}}, in_place);
          job.Fill(static_cast<uint32_t>(n));
          job.Run(&world);
          job.Check();
        }
  }
}

TEST(AdasumWeighsEveryTensorOfACallByItself) {
  std::vector<Described> tensors;
  std::mt19937 random(3);
  for (int i = 0; i < 60; ++i)
    tensors.push_back({kFloats[random() % 4], random() % 7 == 0 ? 0 : random() % 90});
  tensors.push_back({DType::kF32, 5000});
  for (int size : {2, 4, 8})
    for (bool in_place : {true, false}) {
      World world(OneHost(size));
      Job job(size, tensors, in_place);
      job.Fill(11);
      job.Run(&world);
      job.Check();
    }
}

TEST(AdasumOfLongMessagesAndSeveralHosts) {
  for (const std::vector<int>& hosts : {std::vector<int>{0, 0}, {0, 1, 2, 3}}) {
    World world(hosts, "", 64 << 10);
    Job job(static_cast<int>(hosts.size()),
            {{DType::kF32, 700001}, {DType::kF16, 600011}, {DType::kF32, 3}});
    job.Fill(5);
    job.Run(&world);
    job.Check();
  }
}

TEST(AdasumOfEqualVectorsIsThatVector) {
  for (int size : {2, 4, 8})
    for (DType type : kFloats) {
      World world(OneHost(size));
      Job job(size, {{type, 37}});
      for (int r = 0; r < size; ++r)
        for (size_t i = 0; i < 37; ++i) job.Set(r, 0, i, static_cast<double>(i) - 11);
      job.Run(&world);
      for (size_t i = 0; i < 37; ++i)
        CHECK_EQ(job.Out(size - 1, 0, i), static_cast<double>(i) - 11);
    }
}

TEST(AdasumOfOrthogonalVectorsIsTheirSum) {
  for (int size : {2, 4, 8})
    for (DType type : kFloats) {
      World world(OneHost(size));
      const size_t n = 41;
      Job job(size, {{type, n}});
      // Only rank r has values other than 0 at the elements r, r + size, ...
      for (size_t i = 0; i < n; ++i)
        job.Set(static_cast<int>(i) % size, 0, i, static_cast<double>(i) + 1);
      job.Run(&world);
      for (size_t i = 0; i < n; ++i)
        CHECK_EQ(job.Out(0, 0, i), static_cast<double>(i) + 1);
    }
}

TEST(AdasumOfScaledVectorsIsScaled) {
  World world(OneHost(4));
  Job one(4, {{DType::kF32, 100}}), other(4, {{DType::kF32, 100}});
  one.Fill(21);
  std::mt19937 random(8);
  for (int r = 0; r < 4; ++r)
    for (size_t i = 0; i < 100; ++i) other.Set(r, 0, i, one.Out(r, 0, i) * 1024);
  one.Run(&world);
  other.Run(&world);
  // With a power of two as the factor, all roundings are equal.
  for (size_t i = 0; i < 100; ++i)
    CHECK_EQ(other.Out(2, 0, i), one.Out(2, 0, i) * 1024);
}

TEST(AdasumIgnoresRanksWithoutGradients) {
  World world(OneHost(4));
  Job job(4, {{DType::kF32, 9}, {DType::kF64, 9}});
  for (size_t i = 0; i < 9; ++i) {
    job.Set(2, 0, i, static_cast<double>(i) + 1);  // the others have zeros
    for (int r = 0; r < 4; ++r) job.Set(r, 1, i, -0.0);
  }
  job.Run(&world);
  for (size_t i = 0; i < 9; ++i) {
    CHECK_EQ(job.Out(3, 0, i), static_cast<double>(i) + 1);
    CHECK_EQ(job.Out(1, 1, i), 0.0);
  }
  job.CheckBits();
}

TEST(AdasumOfNaNsEndsWithTheSameBits) {
  World world(OneHost(4));
  Job job(4, {{DType::kF32, 50}, {DType::kF32, 5}});
  job.Fill(4);
  job.Set(1, 0, 17, std::nan(""));
  job.Run(&world);
  CHECK(std::isnan(job.Out(0, 0, 0)));
  CHECK(!std::isnan(job.Out(0, 1, 0)));  // the second tensor is not affected
  job.CheckBits();
}

TEST(AdasumScalesBeforeAndAfter) {
  for (int size : {1, 2, 4})
    for (bool in_place : {true, false}) {
      World world(OneHost(size));
      Job plain(size, {{DType::kF32, 70}, {DType::kF64, 3}});
      Job scaled(size, {{DType::kF32, 70}, {DType::kF64, 3}}, in_place);
      plain.Fill(6);
      scaled.Fill(6);
      plain.Run(&world);
      world.Each([&](Communicator& c) {
        Call call = scaled.For(c.rank());
        call.prescale = 0.25;
        call.postscale = 32;
        CHECK(c.Run(call).ok());
      });
      for (size_t i = 0; i < 70; ++i)
        CHECK_EQ(scaled.Out(0, 0, i), 8 * plain.Out(0, 0, i));
      scaled.CheckBits();
    }
}

TEST(AdasumIsCountedUnderItsName) {
  World world(OneHost(2));
  Job job(2, {{DType::kF32, 1000}, {DType::kF32, 24}});
  job.Fill(1);
  job.Run(&world);
  auto stats = world.ranks[0]->log().stats().at("allreduce");
  CHECK_EQ(stats.algorithms.at("adasum"), 1u);
  CHECK_EQ(stats.bytes, 4096u);
  // Each rank sends half the vector twice, and three doubles for each tensor.
  CHECK_EQ(stats.sent_bytes, 2048u + 2048u + 2 * 24u);
}

// Runs the call on all ranks. All must refuse it with `text` and stay usable.
void CheckRefused(World* world, const std::string& text,
                  const std::function<void(Call*)>& change) {
  world->Each([&](Communicator& c) {
    std::vector<float> data(6, 1.0f);
    Call call = AllreduceOf(&data, ReduceOp::kAdasum);
    change(&call);
    const Status status = c.Run(call);
    CHECK(status.code() == Code::kInvalidArgument);
    CHECK(status.message().find(text) != std::string::npos);
    for (float x : data) CHECK_EQ(x, 1.0f);
    std::vector<float> next(6, 1.0f);
    CHECK(c.Run(AllreduceOf(&next)).ok());
  });
}

TEST(AdasumRefusesImpossibleCalls) {
  for (int size : {3, 5, 6}) {
    World world(OneHost(size));
    CheckRefused(&world,
                 "Adasum needs a power of two of ranks, this process set has " +
                     std::to_string(size),
                 [](Call*) {});
  }
  World world(OneHost(2));
  for (DType type : {DType::kI32, DType::kU32})
    CheckRefused(&world, "op=ADASUM is for tensors of f16, bf16, f32 or f64, not",
                 [type](Call* call) { call->tensors[0].dtype = type; });
  CheckRefused(&world, "no compression",
               [](Call* call) { call->wire = static_cast<int>(DType::kBF16); });
  CheckRefused(&world, "for allreduce only", [](Call* call) {
    call->op = Collective::kReducescatter;
    call->rows = {3, 3};
  });
}

TEST(ARankThatIsLostDuringAdasumEndsTheCall) {
  World world(OneHost(4), "", 4096, 1.5);
  world.Each([](Communicator& c) {
    if (c.rank() == 2) return;
    std::vector<float> data(100, 1.0f);
    CHECK(c.Run(AllreduceOf(&data, ReduceOp::kAdasum)).code() ==
          Code::kDeadlineExceeded);
  });
}

}  // namespace
}  // namespace ringjax
