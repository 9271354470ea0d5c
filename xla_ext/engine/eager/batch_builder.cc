// Implements BatchBuilder: adds tensors to a call, allocates results, and supplies
// neutral elements for a rank that has joined. See batch_builder.h.
#include "engine/eager/batch_builder.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <limits>

#include "base/reduce.h"

namespace ringjax {
namespace {

constexpr int64_t kMaxRows = int64_t{1} << 40;  // limits each rank: no sum overflows

template <typename T>
void SetBytes(std::vector<std::byte>* pattern, T value) {
  pattern->resize(sizeof value);
  std::memcpy(pattern->data(), &value, sizeof value);
}

// Sets `*pattern` to `value`, encoded in a floating-point or complex dtype.
void SetReal(DType dtype, double value, std::vector<std::byte>* pattern) {
  if (dtype == DType::kC128 || dtype == DType::kF64) {
    SetBytes<double>(pattern, value);
  } else if (dtype == DType::kC64 || dtype == DType::kF32) {
    SetBytes<float>(pattern, static_cast<float>(value));
  } else {
    Arithmetic narrow;
    narrow.dtype = DType::kF64;
    narrow.wire = dtype;
    pattern->resize(Width(dtype));
    Encode(pattern->data(), &value, 1, narrow, false);
  }
  pattern->resize(Width(dtype), std::byte{0});  // the imaginary part
}

// Sets `*pattern` to the bytes of the least or greatest value of a dtype. Not called
// for complex dtypes, for which CheckReduction refuses MIN and MAX.
void Extreme(DType dtype, bool highest, std::vector<std::byte>* pattern) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  if (IsFloat(dtype)) return SetReal(dtype, highest ? kInfinity : -kInfinity, pattern);
  if (dtype == DType::kBool) return SetBytes<uint8_t>(pattern, highest ? 1 : 0);
  // In the least or greatest integer, all bits except the sign bit are equal.
  pattern->assign(Width(dtype), highest ? std::byte{0xff} : std::byte{0});
  if (dtype >= DType::kI8 && dtype <= DType::kI64)
    pattern->back() = highest ? std::byte{0x7f} : std::byte{0x80};
}

// Sets `*pattern` to the bytes of the input that does not change a product. The call
// multiplies each input by `scale`, so this input is 1 / scale.
Status NeutralOfProduct(DType dtype, double scale, std::vector<std::byte>* pattern) {
  if (!IsFloat(dtype) && !IsComplex(dtype)) {
    if (scale != 1)
      return Status(Code::kInvalidArgument,
                    "a rank has joined, and a product of scaled integers has no "
                    "neutral element");
    pattern->assign(Width(dtype), std::byte{0});
    (*pattern)[0] = std::byte{1};
    return OkStatus();
  }
  SetReal(dtype, 1 / scale, pattern);
  return OkStatus();
}

// Sets `*pattern` to the input of a rank that has joined: the bytes of a value that
// does not change the result. A single zero byte stands for zero in any dtype.
Status NeutralElement(const Submission& s, DType dtype,
                      std::vector<std::byte>* pattern) {
  pattern->assign(1, std::byte{0});
  // The call multiplies this value by prescale, too. A negative factor turns the
  // greatest value into the least.
  const bool turned = s.prescale < 0;
  if (s.prescale == 0) return OkStatus();
  switch (s.reduce_op) {
    case ReduceOp::kMin:
      Extreme(dtype, !turned, pattern);
      break;
    case ReduceOp::kMax:
      Extreme(dtype, turned, pattern);
      break;
    case ReduceOp::kProduct:
      return NeutralOfProduct(dtype, s.prescale, pattern);
    case ReduceOp::kSum:
    case ReduceOp::kAverage:
    case ReduceOp::kAdasum:
      break;
  }
  return OkStatus();
}

void Fill(std::byte* to, uint64_t bytes, std::span<const std::byte> pattern) {
  if (pattern.empty() || bytes == 0) return;
  if (pattern.size() == 1) {
    std::memset(to, static_cast<int>(pattern[0]), bytes);
    return;
  }
  uint64_t done = std::min<uint64_t>(bytes, pattern.size());
  std::memcpy(to, pattern.data(), done);
  for (uint64_t n; done < bytes; done += n) {
    n = std::min(done, bytes - done);
    std::memcpy(to + done, to, n);
  }
}

// Returns how many rows of tensor `i` the rank with submission `s` sends to rank `to`
// (alltoall) or to all ranks (allgather). A null `s` stands for a rank that has joined.
int64_t RowsFor(const SubmissionPtr& s, size_t i, size_t to, size_t size) {
  if (!s) return 0;
  const int64_t rows = s->tensors[i].dims[0];
  if (s->op == Collective::kAllgather) return rows;
  if (s->splits.empty()) return rows / static_cast<int64_t>(size);
  return s->splits[i * size + to];
}

// Returns whether, in an alltoall, every rank sends the same number of rows of a tensor
// to every rank, for each tensor.
bool IsEven(const Ready& ready, size_t size) {
  for (size_t i = 0; i < ready.any->tensors.size(); ++i) {
    const int64_t first = RowsFor(ready.by_rank[0], i, 0, size);
    const bool even = ready.by_rank.AllOf([&](const SubmissionPtr& s) {
      for (size_t to = 0; to < (s && !s->splits.empty() ? size : 1); ++to)
        if (RowsFor(s, i, to, size) != first) return false;
      return true;
    });
    if (!even) return false;
  }
  return true;
}

}  // namespace

BatchBuilder::BatchBuilder(const LaneState& state)
    : state_(state), communicator_(state.communicator) {}

Result<std::shared_ptr<void>> BatchBuilder::Allocate(
    const Submission& s, uint64_t bytes, std::span<const std::byte> pattern) const {
  if (s.cuda) {
    if (!state_.cuda)
      return Status(Code::kFailedPrecondition, "this rank has no CUDA device");
    return state_.cuda->Allocate(bytes, pattern);
  }
  void* memory = nullptr;
  const uint64_t room = (bytes + Batch::kAlign - 1) / Batch::kAlign * Batch::kAlign;
  if (room < bytes ||
      posix_memalign(&memory, Batch::kAlign, std::max(room, Batch::kAlign)) != 0)
    return Status(Code::kInternal,
                  "no memory for a result of " + std::to_string(bytes) + " bytes");
  Fill(static_cast<std::byte*>(memory), bytes, pattern);
  return std::shared_ptr<void>(memory, [](void* p) { std::free(p); });
}

// Adds the tensors of an operation whose result sizes do not depend on other ranks.
void BatchBuilder::AddFixed(const Submission& s, Call* call) const {
  const int rank = communicator_->rank(), size = communicator_->size();
  for (size_t i = 0; i < s.tensors.size(); ++i) {
    Tensor& t = call->tensors.emplace_back();
    t.dtype = s.tensors[i].dtype;
    t.dims = s.tensors[i].dims;
    t.room = ResultBytes(s, i, rank, size);
    if (s.op != Collective::kReducescatter) continue;
    for (int r = 0; r < size; ++r) call->rows.push_back(ShareOf(t.dims[0], r, size));
  }
}

// Sets the addresses of tensor `i` of an operation, which is tensor `tensor` of the
// call. If this rank has joined, the addresses are those of neutral elements in memory
// that is freed after the call.
Status BatchBuilder::Place(const Ready& ready, size_t i, size_t tensor,
                           Batch* batch) const {
  const Submission& s = *ready.any;
  Tensor& t = batch->call.tensors[tensor];
  if (const Task* task = LookAtMine(ready, communicator_->rank())) {
    t.in = task->ins[i];
    t.out = task->outs[i];
    // A call that may run again must not overwrite its inputs
    // (DecisionRunner::MoveAside).
    if (state_.resilient->repairs() && s.op == Collective::kAllreduce &&
        t.in == t.out && communicator_->size() > 1)
      batch->aside.emplace_back(tensor, t.out);
    return OkStatus();
  }
  std::vector<std::byte> pattern;
  if (s.Reduces()) RJ_TRY(NeutralElement(s, t.dtype, &pattern));
  auto in = Allocate(s, t.bytes(), pattern);
  if (!in.ok()) return in.status();
  t.in = t.out = batch->joined_memory.emplace_back(std::move(in.value())).get();
  if (s.op != Collective::kReducescatter) return OkStatus();
  auto out = Allocate(s, t.room, {});
  if (!out.ok()) return out.status();
  t.out = batch->joined_memory.emplace_back(std::move(out.value())).get();
  return OkStatus();
}

// Adds tensor `i` of an allgather or alltoall, whose result size depends on the rows of
// all ranks. The result is written to the memory of the caller if that memory has
// exactly the right size, and otherwise to memory that the core allocates.
Status BatchBuilder::AddRagged(const Ready& ready, size_t i,
                               std::vector<Output>* outputs, Batch* batch) const {
  const Task* const task = LookAtMine(ready, communicator_->rank());
  const Submission& s = task ? *task : *ready.any;
  const auto size = static_cast<size_t>(communicator_->size());
  const auto rank = static_cast<size_t>(communicator_->rank());
  Output output;
  output.dtype = s.tensors[i].dtype;
  output.dims = s.tensors[i].dims;
  uint64_t row = Width(output.dtype);
  for (size_t d = 1; d < output.dims.size(); ++d)
    if (__builtin_mul_overflow(row, static_cast<uint64_t>(output.dims[d]), &row))
      return Status(Code::kInvalidArgument, "rows are larger than any memory");
  int64_t total = 0;
  for (size_t r = 0; r < size; ++r) {
    const int64_t rows = RowsFor(ready.by_rank[r], i, rank, size);
    if (rows < 0 || rows > kMaxRows)
      return Status(Code::kInvalidArgument, "a row count is beyond any memory");
    output.received.push_back(rows);
    total += rows;
  }
  uint64_t room = 0;
  if (__builtin_mul_overflow(row, static_cast<uint64_t>(total), &room))
    return Status(Code::kInvalidArgument, "the result is larger than any memory");
  const bool fits = task && !task->rooms.empty() && task->rooms[i] == room;
  const std::shared_ptr<void> nobodys;
  auto memory =
      fits ? std::shared_ptr<void>(nobodys, task->outs[i]) : Allocate(s, room, {});
  if (!memory.ok()) return memory.status();
  Tensor& t = batch->call.tensors.emplace_back();
  if (!task) output.dims[0] = 0;
  t.dtype = output.dtype;
  t.dims = output.dims;
  t.in = task ? task->ins[i] : nullptr;
  t.out = memory.value().get();
  t.room = room;
  std::vector<int64_t>& rows = batch->call.rows;
  if (s.op == Collective::kAlltoall)
    for (size_t r = 0; r < size; ++r)
      rows.push_back(RowsFor(ready.by_rank[rank], i, r, size));
  rows.insert(rows.end(), output.received.begin(), output.received.end());
  output.dims[0] = total;
  output.memory = std::move(memory.value());
  if (task)
    outputs->push_back(std::move(output));
  else
    batch->joined_memory.push_back(std::move(output.memory));
  return OkStatus();
}

// Describes the call of a decision, but for the tensors of an allgather or alltoall.
void BatchBuilder::Describe(const Decision& decision, KeptCall* kept) const {
  const Submission& first = *decision.fused[0].any;
  kept->only = nullptr;
  kept->requests.clear();
  Call& call = kept->call = Call();
  call.op = first.op;
  call.reduce_op = first.reduce_op;
  call.prescale = first.prescale;
  call.postscale = first.postscale;
  call.root = first.root;
  call.rows_known = true;  // all ranks have received all submissions
  kept->name = first.name;
  if (const size_t more = decision.fused.size() - 1; more > 0)
    kept->name += " (and " + std::to_string(more) + " more)";
  call.name = kept->name;
  size_t tensors = 0;
  for (const Ready& ready : decision.fused) tensors += ready.any->tensors.size();
  call.tensors.reserve(tensors);
  if (RaggedRows(call.op)) return;
  for (const Ready& ready : decision.fused) AddFixed(*ready.any, &call);
  if (decision.fused.size() == 1) kept->only = decision.fused[0].any;
}

Status BatchBuilder::Build(const Decision& decision, Batch* batch) const {
  // Each epoch of an elastic job has submissions of its own, so the ranks have not
  // changed since `only` was described.
  if (decision.fused.size() > 1 || decision.fused[0].any != batch->kept.only)
    Describe(decision, &batch->kept);
  const bool ragged = RaggedRows(batch->call.op);
  size_t next = 0, tensor = 0;
  for (const Ready& ready : decision.fused) {
    std::vector<Output>* outputs = ragged && LookAtMine(ready, communicator_->rank())
                                       ? &batch->outputs[next++]
                                       : nullptr;
    for (size_t i = 0; i < ready.any->tensors.size(); ++i, ++tensor)
      RJ_TRY(ragged ? AddRagged(ready, i, outputs, batch)
                    : Place(ready, i, tensor, batch));
  }
  batch->call.even =
      batch->call.op == Collective::kAlltoall &&
      std::all_of(decision.fused.begin(), decision.fused.end(),
                  [&](const Ready& ready) {
                    return IsEven(ready, static_cast<size_t>(communicator_->size()));
                  });
  return OkStatus();
}

}  // namespace ringjax
