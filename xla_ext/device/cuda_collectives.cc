// See cuda_collectives.h.
#include "device/cuda_collectives.h"

#include <algorithm>
#include <span>

#include "device/reduction.h"

// Issues an NCCL operation of `work` and returns its status.
#define RJ_NCCL(work, function, ...)                                        \
  Issued(work, nccl_.function(__VA_ARGS__, comm_.handle(), (work)->stream), \
         "nccl" #function)

namespace ringjax {
namespace {

std::byte* At(void* base, uint64_t offset) {
  return static_cast<std::byte*>(base) + offset;
}
void* At(cuda::Pointer base, uint64_t offset) {
  return reinterpret_cast<void*>(base + offset);
}

bool AllEqual(std::span<const int64_t> rows) {
  return std::all_of(rows.begin(), rows.end(), [&](int64_t n) { return n == rows[0]; });
}

uint64_t RowElements(const Tensor& t) {
  uint64_t n = IsComplex(t.dtype) ? 2 : 1;
  for (size_t d = 1; d < t.dims.size(); ++d) n *= static_cast<uint64_t>(t.dims[d]);
  return n;
}

uint64_t RowBytes(const Tensor& t) {
  return RowElements(t) * Width(ComponentType(t.dtype));
}

}  // namespace

CudaCollectives::CudaCollectives(std::shared_ptr<Communicator> control,
                                 const DeviceResources& device, NcclComm& comm,
                                 Fusion mode)
    : control_(std::move(control)),
      driver_(device.driver()),
      nccl_(comm.nccl()),
      device_(device),
      comm_(comm),
      mode_(mode) {}

Status CudaCollectives::Enqueue(Work* work) {
  switch (work->call.op) {
    case Collective::kAllreduce:
    case Collective::kBroadcast:
      return Fused(work);
    case Collective::kAllgather:
      return Allgather(work);
    case Collective::kReducescatter:
      return Reducescatter(work);
    case Collective::kAlltoall:
      return Alltoall(work);
    case Collective::kBarrier:
      return Barrier(work);
    case Collective::kExchange:
      break;
  }
  return Status(Code::kInternal, "unknown collective");
}

cuda::Kernels::Target CudaCollectives::TargetOf(Work* work, cuda::Pointer fused) const {
  // With one rank no peer can be lost, so no result needs the poison word.
  return {work->stream, fused, size() > 1 ? device_.poison_word() : 0,
          &work->used.launches};
}

Status CudaCollectives::Issued(Work* work, nccl::Outcome outcome,
                               std::string_view what) {
  ++work->used.nccl_ops;
  return nccl_.Check(outcome, what, comm_.handle());
}

Status CudaCollectives::Group(Work* work, const std::function<Status()>& body) {
  const Status status = comm_.Group(work->call, body);
  work->unsettled = !status.ok();
  return status;
}

// Writes NaN to the beginning of each piece of a result if the poison word is set. A
// result that consists of the rows of several ranks has one piece for each rank,
// because a program may read the rows of one rank only.
Status CudaCollectives::Seal(Work* work, const std::vector<Sealed>& pieces) {
  if (size() == 1 || !device_.kernels().available()) return OkStatus();
  for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16, DType::kF64}) {
    patches_.clear();
    for (const Sealed& p : pieces) {
      const Tensor& t = work->call.tensors[p.tensor];
      if (ComponentType(t.dtype) == dtype && p.bytes > 0)
        patches_.push_back(
            {cuda::ToPointer(t.out) + p.offset, p.bytes / Width(dtype), 0});
    }
    if (!patches_.empty())
      RJ_TRY(device_.kernels().Seal(patches_, dtype, TargetOf(work, 0)));
  }
  return OkStatus();
}

// Packs the tensors of each segment into the fused buffer, reduces or broadcasts the
// segments and the tensors that are not packed in one NCCL group, and unpacks the
// segments. Unpack poisons the packed results of an allreduce, Seal all other results.
Status CudaCollectives::Fused(Work* work) {
  const Call& call = work->call;
  const FusionPlan& plan = work->plan;
  const bool reduces = call.op == Collective::kAllreduce;
  cuda::Pointer fused = 0;
  if (plan.bytes > 0) {
    Result<cuda::Pointer> space = work->workspace(plan.bytes);
    if (!space.ok()) return space.status();
    fused = space.value();
  }
  const auto target = TargetOf(work, fused);
  for (const Segment& s : plan.segments) {
    if (!reduces && rank() != call.root) break;  // only the root of a broadcast sends
    Gather(call, s, &Tensor::in);
    RJ_TRY(device_.kernels().Pack(
        patches_, s.dtype, s.wire,
        reduces ? FactorsOf(call, s.wire, size()).before : 1.0, target));
  }
  auto move = [&](const void* in, void* out, uint64_t elements, DType dtype, DType wire,
                  ReduceOp op) -> Status {
    if (!reduces)
      return RJ_NCCL(work, Broadcast, in, out, elements * Width(wire), nccl::kInt8,
                     call.root);
    Result<Reduction> r = ReductionOf(dtype, wire, op, size());
    if (!r.ok()) return r.status();
    return RJ_NCCL(work, AllReduce, in, out, elements, r.value().type, r.value().op);
  };
  if (Alone() && plan.segments.empty()) return CopyThrough(work);
  const Status issued = Group(work, [&]() -> Status {
    for (const Segment& s : plan.segments)
      RJ_TRY(move(At(fused, s.offset), At(fused, s.offset), s.elements(), s.dtype,
                  s.wire, FactorsOf(call, s.wire, size()).op));
    for (size_t i : plan.in_place) {
      const Tensor& t = call.tensors[i];
      RJ_TRY(move(t.in, t.out, Components(t), t.dtype, ComponentType(t.dtype),
                  call.reduce_op));
    }
    return OkStatus();
  });
  RJ_TRY(issued);
  return Unfuse(work, target);
}

void CudaCollectives::Gather(const Call& call, const Segment& segment,
                             void* Tensor::* address) {
  patches_.clear();
  for (const Packed& p : segment.pieces)
    patches_.push_back(
        {cuda::ToPointer(call.tensors[p.tensor].*address), p.elements, p.offset});
}

Status CudaCollectives::Unfuse(Work* work, const cuda::Kernels::Target& target) {
  const Call& call = work->call;
  const FusionPlan& plan = work->plan;
  const bool reduces = call.op == Collective::kAllreduce;
  std::vector<Sealed> pieces;
  auto seal = [&](size_t i) { pieces.push_back({i, 0, call.tensors[i].bytes()}); };
  // A broadcast must keep all bits. The kernels that can write NaN do arithmetic, which
  // may change the bits of a NaN; without a poison word Unpack only copies.
  auto into = target;
  if (!reduces) into.poison = 0;
  for (const Segment& s : plan.segments) {
    Gather(call, s, &Tensor::out);
    RJ_TRY(device_.kernels().Unpack(
        patches_, s.dtype, s.wire,
        reduces ? FactorsOf(call, s.wire, size()).after : 1.0, into));
    for (const Packed& p : s.pieces)
      if (!reduces) seal(p.tensor);
  }
  work->used.packed_bytes += plan.packed_bytes();
  for (size_t i : plan.in_place) seal(i);
  return Seal(work, pieces);
}

// Returns whether a call may skip NCCL: there is only one rank, and the fusion mode is
// hybrid. The other fusion modes use NCCL even with one rank, so that benchmarks can
// measure those modes on one GPU.
bool CudaCollectives::Alone() const { return size() == 1 && mode_ == Fusion::kHybrid; }

Status CudaCollectives::CopyThrough(Work* work) {
  for (size_t i : work->plan.in_place) {
    const Tensor& t = work->call.tensors[i];
    if (t.in != t.out)
      RJ_CUDA(driver_, MemcpyDtoDAsync, cuda::ToPointer(t.out), cuda::ToPointer(t.in),
              t.bytes(), work->stream);
  }
  return OkStatus();
}

Status CudaCollectives::Allgather(Work* work) {
  const Call& call = work->call;
  const size_t p = static_cast<size_t>(size());
  const Status issued = Group(work, [&]() -> Status {
    for (size_t i = 0; i < call.tensors.size(); ++i) {
      const Tensor& t = call.tensors[i];
      const auto rows = std::span(call.rows).subspan(i * p, p);
      const uint64_t row = RowBytes(t);
      if (AllEqual(rows)) {
        if (t.bytes() > 0)
          RJ_TRY(RJ_NCCL(work, AllGather, t.in, t.out, t.bytes(), nccl::kInt8));
        continue;
      }
      uint64_t offset = 0;
      for (size_t r = 0; r < p; ++r) {
        const uint64_t bytes = static_cast<uint64_t>(rows[r]) * row;
        std::byte* to = At(t.out, offset);
        const void* from = static_cast<int>(r) == rank() ? t.in : to;
        if (bytes > 0)
          RJ_TRY(RJ_NCCL(work, Broadcast, from, to, bytes, nccl::kInt8,
                         static_cast<int>(r)));
        offset += bytes;
      }
    }
    return OkStatus();
  });
  RJ_TRY(issued);
  return SealBlocks(work, 0, p);
}

// Calls Seal for the rows of each rank in each result. The row counts of result i are
// the entries of call.rows from `first` + i * `stride` on, one for each rank.
Status CudaCollectives::SealBlocks(Work* work, size_t first, size_t stride) {
  std::vector<Sealed> pieces;
  for (size_t i = 0; i < work->call.tensors.size(); ++i) {
    uint64_t offset = 0;
    for (size_t r = 0; r < static_cast<size_t>(size()); ++r) {
      const uint64_t bytes =
          static_cast<uint64_t>(work->call.rows[first + i * stride + r]) *
          RowBytes(work->call.tensors[i]);
      pieces.push_back({i, offset, bytes});
      offset += bytes;
    }
  }
  return Seal(work, pieces);
}

// One tensor of a reducescatter. NCCL reads `from` and writes `to`, which are in the
// fused buffer if the elements are converted, and in the tensor's own memory otherwise.
struct CudaCollectives::Scattered {
  const void* from;
  void* to;
  DType type, wire;
  uint64_t row;                   // the elements of one row
  std::span<const int64_t> rows;  // the number of rows that each rank receives
  bool converts;
  cuda::Patch in, out;  // patches of Pack and Unpack if `converts`
};

Status CudaCollectives::Reducescatter(Work* work) {
  const Call& call = work->call;
  const size_t p = static_cast<size_t>(size()), n = call.tensors.size();
  std::vector<Scattered> all(n);
  std::vector<Sealed> plain;
  uint64_t bytes = 0;
  auto reserve = [&](uint64_t elements, DType wire) {
    return std::exchange(bytes, bytes + (elements * Width(wire) + 15) / 16 * 16);
  };
  for (size_t i = 0; i < n; ++i) {
    const Tensor& t = call.tensors[i];
    const DType type = ComponentType(t.dtype), wire = WireType(call, t);
    const uint64_t out = t.room / Width(type);
    all[i] = {t.in,
              t.out,
              type,
              wire,
              RowElements(t),
              std::span(call.rows).subspan(i * p, p),
              Converts(call, t) ||
                  (device_.kernels().available() && AveragesLast(call, wire, size())),
              {},
              {}};
    if (!all[i].converts) {
      plain.push_back({i, 0, t.room});
      continue;
    }
    all[i].in = {cuda::ToPointer(t.in), Components(t), reserve(Components(t), wire)};
    all[i].out = {cuda::ToPointer(t.out), out, reserve(out, wire)};
  }
  Result<cuda::Pointer> fused = bytes > 0 ? work->workspace(bytes) : cuda::Pointer{0};
  if (!fused.ok()) return fused.status();
  const auto target = TargetOf(work, fused.value());
  for (Scattered& s : all) {
    if (!s.converts) continue;
    RJ_TRY(device_.kernels().Pack({&s.in, 1}, s.type, s.wire,
                                  FactorsOf(call, s.wire, size()).before, target));
    s.from = At(fused.value(), s.in.offset);
    s.to = At(fused.value(), s.out.offset);
  }
  const Status issued = Group(work, [&]() -> Status {
    for (size_t i = 0; i < n; ++i) RJ_TRY(Scatter(work, all[i], call.tensors[i].dtype));
    return OkStatus();
  });
  RJ_TRY(issued);
  for (const Scattered& s : all)
    if (s.converts)
      RJ_TRY(device_.kernels().Unpack({&s.out, 1}, s.type, s.wire,
                                      FactorsOf(call, s.wire, size()).after, target));
  return Seal(work, plain);
}

Status CudaCollectives::Scatter(Work* work, const Scattered& s, DType dtype) {
  const Call& call = work->call;
  const ReduceOp reduce =
      s.converts ? FactorsOf(call, s.wire, size()).op : call.reduce_op;
  const Result<Reduction> how = ReductionOf(dtype, s.wire, reduce, size());
  if (!how.ok()) return how.status();
  const auto [type, op] = how.value();
  if (AllEqual(s.rows)) {
    const uint64_t count = static_cast<uint64_t>(s.rows[0]) * s.row;
    if (count == 0) return OkStatus();
    return RJ_NCCL(work, ReduceScatter, s.from, s.to, count, type, op);
  }
  uint64_t offset = 0;
  for (size_t root = 0; root < s.rows.size(); ++root) {
    const uint64_t count = static_cast<uint64_t>(s.rows[root]) * s.row;
    const void* from = static_cast<const std::byte*>(s.from) + offset * Width(s.wire);
    offset += count;
    if (count > 0)
      RJ_TRY(
          RJ_NCCL(work, Reduce, from, s.to, count, type, op, static_cast<int>(root)));
  }
  return OkStatus();
}

Status CudaCollectives::Alltoall(Work* work) {
  const Call& call = work->call;
  const size_t p = static_cast<size_t>(size());
  const Status issued = Group(work, [&]() -> Status {
    for (size_t i = 0; i < call.tensors.size(); ++i) {
      const Tensor& t = call.tensors[i];
      const auto rows = std::span(call.rows).subspan(i * 2 * p, 2 * p);
      const uint64_t row = RowBytes(t);
      uint64_t sent = 0, received = 0;
      for (size_t r = 0; r < p; ++r) {
        const int peer = static_cast<int>(r);
        const uint64_t out = static_cast<uint64_t>(rows[r]) * row;
        const uint64_t in = static_cast<uint64_t>(rows[p + r]) * row;
        if (out > 0)
          RJ_TRY(RJ_NCCL(work, Send, At(t.in, sent), out, nccl::kInt8, peer));
        if (in > 0)
          RJ_TRY(RJ_NCCL(work, Recv, At(t.out, received), in, nccl::kInt8, peer));
        sent += out;
        received += in;
      }
    }
    return OkStatus();
  });
  RJ_TRY(issued);
  return SealBlocks(work, p, 2 * p);
}

Status CudaCollectives::Barrier(Work* work) {
  void* word = At(device_.barrier_word(), 0);
  return Group(work, [&] {
    return RJ_NCCL(work, AllReduce, word, word, 1, nccl::kInt32, nccl::kMax);
  });
}

}  // namespace ringjax
