// Checks a call and splits it into requests. See requests.h.
#include "engine/communicator/requests.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <string>

#include "engine/communicator/exact_exchange.h"

namespace ringjax {
namespace {

uint64_t RowElements(const Tensor& t) {
  uint64_t n = 1;
  for (size_t d = 1; d < t.dims.size(); ++d) n *= static_cast<uint64_t>(t.dims[d]);
  return n;
}

Status Invalid(const std::string& what) { return {Code::kInvalidArgument, what}; }

uint64_t Total(std::span<const int64_t> rows) {
  return std::accumulate(rows.begin(), rows.end(), uint64_t{0});
}

// The row counts of a tensor and of its result, on this rank.
struct Rows {
  uint64_t in = 0, out = 0;
};

Rows OwnRows(Collective op, std::span<const int64_t> rows, size_t rank, size_t size) {
  switch (op) {
    case Collective::kAllgather:
      return {static_cast<uint64_t>(rows[rank]), Total(rows)};
    case Collective::kReducescatter:
      return {Total(rows), static_cast<uint64_t>(rows[rank])};
    default:
      return {Total(rows.first(size)), Total(rows.last(size))};
  }
}

Status CheckRows(const Call& call, const Tensor& t, std::span<const int64_t> rows,
                 size_t rank, size_t size) {
  if (t.dims.empty()) return Invalid("a tensor without dimensions has no rows");
  constexpr int64_t kMaxRows = int64_t{1} << 40;  // so that no sum can overflow
  if (std::any_of(rows.begin(), rows.end(),
                  [](int64_t n) { return n < 0 || n > kMaxRows; }))
    return Invalid("a row count is negative or beyond any memory");
  const Rows own = OwnRows(call.op, rows, rank, size);
  if (own.in != static_cast<uint64_t>(t.dims[0]))
    return Invalid("row counts say " + std::to_string(own.in) +
                   " rows, the tensor is " + Describe(t));
  uint64_t bytes = 0;
  if (__builtin_mul_overflow(own.out, RowElements(t) * Width(t.dtype), &bytes) ||
      bytes != t.room)
    return Invalid(std::to_string(own.out) + " rows like those of " + Describe(t) +
                   " do not fit a result of " + std::to_string(t.room) + " bytes");
  return OkStatus();
}

// Returns "tensor 3 'layer/kernel': ", or "" if the call has only one tensor.
std::string Label(const Call& call, size_t i) {
  if (call.tensors.size() == 1) return "";
  std::string text = "tensor " + std::to_string(i);
  if (const auto name = call.TensorName(i); !name.empty())
    text += " '" + std::string(name) + "'";
  return text + ": ";
}

}  // namespace

Status CheckCall(const Call& call, int rank, int size) {
  if (call.op == Collective::kExchange) return CheckExchange(call);
  const bool reduces =
      call.op == Collective::kAllreduce || call.op == Collective::kReducescatter;
  const size_t p = static_cast<size_t>(size);
  size_t per_tensor = 0;
  if (call.op == Collective::kAllgather || call.op == Collective::kReducescatter)
    per_tensor = p;
  if (call.op == Collective::kAlltoall) per_tensor = 2 * p;
  if (call.rows.size() != per_tensor * call.tensors.size()) {
    // An alltoall has two counts for each rank and tensor, an allgather has one.
    const size_t per_rank = std::max<size_t>(1, per_tensor / p * call.tensors.size());
    return Status(Code::kFailedPrecondition,
                  "compiled for another number of ranks (for " +
                      std::to_string(call.rows.size() / per_rank) + ", and there are " +
                      std::to_string(size) + " now): trace it again");
  }
  if (call.op == Collective::kBroadcast && (call.root < 0 || call.root >= size))
    return Invalid("root_rank=" + std::to_string(call.root) + " is not in 0.." +
                   std::to_string(size - 1));
  if (reduces && call.reduce_op == ReduceOp::kAdasum && call.wire >= 0)
    return Invalid("op=ADASUM takes tensors as they are: no compression on the wire");
  for (size_t i = 0; i < call.tensors.size(); ++i) {
    const Tensor& t = call.tensors[i];
    Status fits;
    if (reduces) fits = CheckReduction(call.op, call.reduce_op, t.dtype, size);
    if (fits.ok() && per_tensor > 0)
      fits = CheckRows(call, t, RowsOf(call, i, per_tensor), rank, p);
    else if (fits.ok() && t.room != t.bytes())
      fits = Invalid("the result of " + Describe(t) + " has " + std::to_string(t.room) +
                     " bytes");
    if (!fits.ok()) return Status(fits.code(), Label(call, i) + fits.message());
  }
  return OkStatus();
}

Requests Split(const Call& call, int rank, int size) {
  Requests requests;
  auto add = [&](DType dtype) -> Request& {
    Request& r = requests.emplace_back();
    r.op = r.problem.op = call.op;
    r.problem.root = call.root;
    r.arithmetic.dtype = r.arithmetic.wire = dtype;
    return r;
  };
  auto reduce = [&](Request* r) {
    Arithmetic& a = r->arithmetic;
    a.op = call.reduce_op == ReduceOp::kAverage ? ReduceOp::kSum : call.reduce_op;
    a.prescale = call.prescale;
    a.postscale = call.postscale;
    a.divisor = call.reduce_op == ReduceOp::kAverage ? size : 1;
    if (call.wire >= 0 && (a.dtype == DType::kF32 || a.dtype == DType::kF64))
      a.wire = static_cast<DType>(call.wire);
  };
  auto fuse = [&](Request* r, const Tensor& t) {
    r->in.Add(t.in, t.bytes());
    r->out.Add(t.out, t.bytes());
    r->bytes += t.bytes();
    if (r->arithmetic.op == ReduceOp::kAdasum) r->sizes.push_back(t.elements());
  };
  const size_t p = static_cast<size_t>(size);
  switch (call.op) {
    case Collective::kBarrier:
    case Collective::kExchange:  // ExactExchange makes its requests
      break;
    case Collective::kAllreduce: {
      std::array<size_t, kDTypeCount> pieces{}, place{};
      for (const Tensor& t : call.tensors)
        if (t.bytes() > 0) ++pieces[static_cast<size_t>(t.dtype)];
      for (size_t d = 0; d < pieces.size(); ++d) {
        if (pieces[d] == 0) continue;
        place[d] = requests.size();
        Request& r = add(static_cast<DType>(d));
        reduce(&r);
        r.in.Reserve(pieces[d]);
        r.out.Reserve(pieces[d]);
      }
      for (const Tensor& t : call.tensors)
        if (t.bytes() > 0) fuse(&requests[place[static_cast<size_t>(t.dtype)]], t);
      for (Request& r : requests)
        r.problem.counts = {r.bytes / Width(r.arithmetic.dtype)};
      break;
    }
    case Collective::kBroadcast: {
      Request& r = add(DType::kU8);
      for (const Tensor& t : call.tensors) fuse(&r, t);
      r.problem.counts = {r.bytes};
      if (r.bytes == 0) requests.clear();
      break;
    }
    case Collective::kAllgather:
    case Collective::kReducescatter:
    case Collective::kAlltoall:
      for (size_t i = 0; i < call.tensors.size(); ++i) {
        const Tensor& t = call.tensors[i];
        const bool reduces = call.op == Collective::kReducescatter;
        const auto rows = RowsOf(call, i, call.op == Collective::kAlltoall ? 2 * p : p);
        const uint64_t row_bytes = RowElements(t) * Width(t.dtype);
        const Rows own = OwnRows(call.op, rows, static_cast<size_t>(rank), p);
        Request& r = add(reduces ? t.dtype : DType::kU8);
        if (reduces) reduce(&r);
        for (int64_t n : rows)
          r.problem.counts.push_back(static_cast<uint64_t>(n) *
                                     (reduces ? RowElements(t) : row_bytes));
        r.in.Add(t.in, t.bytes());
        r.out.Add(t.out, own.out * row_bytes);
        r.bytes = call.op == Collective::kAllgather ? own.out * row_bytes : t.bytes();
        if (call.op == Collective::kAllgather && r.bytes == 0) requests.pop_back();
      }
      break;
  }
  return requests;
}

}  // namespace ringjax
