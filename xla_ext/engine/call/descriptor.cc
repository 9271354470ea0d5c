// Computes fingerprints of calls, and formats and compares texts about calls. See
// descriptor.h.
#include "engine/call/descriptor.h"

#include <algorithm>
#include <charconv>
#include <sstream>
#include <utility>

#include "engine/call/adasum.h"
#include "engine/call/hash.h"

namespace ringjax {
namespace {

// Returns whether Call::rows must be equal on all ranks.
bool RowsAgree(Collective op) { return op != Collective::kAlltoall; }

std::vector<std::string_view> Lines(std::string_view text) {
  std::vector<std::string_view> lines;
  while (!text.empty()) {
    const size_t end = text.find('\n');
    lines.push_back(text.substr(0, end));
    text.remove_prefix(end == text.npos ? text.size() : end + 1);
  }
  return lines;
}

constexpr long kHeadLines = 10;  // lines of Explain before the tensors
constexpr std::string_view kRefused = "refused: ";
constexpr std::string_view kStep = "optimizer step ";

// Returns the title of the operation: the first line of a text that is no refusal.
std::string_view Title(const std::vector<std::string>& texts) {
  for (std::string_view text : texts)
    if (!IsRefusal(text)) return text.substr(0, text.find('\n'));
  return "?";
}

// Returns the lowest rank whose text is the most frequent one.
int Reference(const std::vector<std::string>& texts) {
  int best = 0;
  long most = 0;
  for (int r = 0; r < static_cast<int>(texts.size()); ++r) {
    const long n = std::count(texts.begin(), texts.end(), texts[r]);
    if (n > most) best = r, most = n;
  }
  return best;
}

}  // namespace

uint64_t Tensor::elements() const {
  uint64_t n = 1;
  for (int64_t d : dims) n *= static_cast<uint64_t>(d);
  return n;
}

Status Call::SetKinds(int64_t op_number, int64_t reduce_number, int64_t wire_number) {
  auto bad = [](const char* what, int64_t number) {
    return Status(Code::kInvalidArgument, "there is no " + std::string(what) +
                                              " number " + std::to_string(number));
  };
  if (op_number < 0 || op_number >= kCollectiveCount)
    return bad("collective", op_number);
  if (reduce_number < 0 || reduce_number > static_cast<int>(ReduceOp::kProduct))
    return bad("reduce op", reduce_number);
  if (wire_number != -1 && wire_number != static_cast<int>(DType::kF16) &&
      wire_number != static_cast<int>(DType::kBF16))
    return bad("wire type", wire_number);
  op = static_cast<Collective>(op_number);
  reduce_op = static_cast<ReduceOp>(reduce_number);
  wire = static_cast<int>(wire_number);
  return OkStatus();
}

std::string Call::Title() const {
  std::string title(Name(op));
  if (!name.empty()) title.append(" '").append(name).append("'");
  return title;
}

std::string_view Call::TensorName(size_t i) const { return Line(names, i); }

bool Call::KeepsInputs() const {
  using Range = std::pair<uintptr_t, uintptr_t>;
  auto range = [](const void* at, uint64_t bytes) {
    const auto begin = reinterpret_cast<uintptr_t>(at);
    return Range{begin, begin + bytes};
  };
  std::vector<std::pair<Range, bool>> ranges;  // true: the call writes the range
  for (const Tensor& t : tensors) {
    if (t.bytes() > 0) ranges.push_back({range(t.in, t.bytes()), false});
    if (t.room > 0) ranges.push_back({range(t.out, t.room), true});
  }
  std::sort(ranges.begin(), ranges.end());
  uintptr_t ends[2] = {0, 0};  // largest end so far: [0] of reads, [1] of writes
  for (const auto& [r, written] : ranges) {
    if (r.first < ends[written ? 0 : 1]) return false;
    ends[written ? 1 : 0] = std::max(ends[written ? 1 : 0], r.second);
  }
  return true;
}

bool RaggedRows(Collective op) {
  return op == Collective::kAllgather || op == Collective::kAlltoall;
}

Status CheckReduction(Collective op, ReduceOp reduce_op, DType dtype, int size) {
  auto invalid = [](const std::string& what) {
    return Status(Code::kInvalidArgument, what);
  };
  if (reduce_op == ReduceOp::kAdasum) {
    if (op != Collective::kAllreduce) return invalid("op=ADASUM is for allreduce only");
    if (!AdasumFits(size))
      return invalid("Adasum needs a power of two of ranks, this process set has " +
                     std::to_string(size));
    if (!IsFloat(dtype))
      return invalid("op=ADASUM is for tensors of f16, bf16, f32 or f64, not " +
                     std::string(Name(dtype)));
  }
  if (IsComplex(dtype) && (reduce_op == ReduceOp::kMin || reduce_op == ReduceOp::kMax))
    return invalid("op=" + std::string(Name(reduce_op)) +
                   " has no order on complex numbers");
  if (dtype == DType::kBool && reduce_op == ReduceOp::kAverage)
    return invalid("op=AVERAGE has no meaning for bool");
  return OkStatus();
}

std::span<const int32_t> UnitsOf(const Call& call) {
  const auto& tensors = call.tensors;
  if (call.op != Collective::kExchange || tensors.size() != ExchangeTensor::kNumber)
    return {};
  const Tensor& units = tensors[ExchangeTensor::kUnits];
  if (units.dtype != DType::kI32) return {};
  return {static_cast<const int32_t*>(units.in), units.elements()};
}

uint64_t Fingerprint(const Call& call) {
  Hash hash;
  hash.Add(static_cast<uint64_t>(call.op) | static_cast<uint64_t>(call.reduce_op) << 8 |
           static_cast<uint64_t>(call.wire & 0xff) << 16 |
           static_cast<uint64_t>(static_cast<uint32_t>(call.root)) << 32);
  hash.Add(call.prescale);
  hash.Add(call.postscale);
  hash.Add(static_cast<uint64_t>(call.step));
  hash.Add(static_cast<uint64_t>(call.bucket));
  hash.Add(call.name);
  if (!call.partition.empty()) hash.Add(call.partition);
  hash.Add(call.tensors.size());
  const size_t skip = RaggedRows(call.op) ? 1 : 0;
  for (const Tensor& t : call.tensors) {
    hash.Add(static_cast<uint64_t>(t.dtype) | t.dims.size() << 8);
    for (size_t d = skip; d < t.dims.size(); ++d)
      hash.Add(static_cast<uint64_t>(t.dims[d]));
  }
  if (RowsAgree(call.op))
    for (int64_t rows : call.rows) hash.Add(static_cast<uint64_t>(rows));
  for (int32_t unit : UnitsOf(call)) hash.Add(static_cast<uint64_t>(unit));
  return hash.value();
}

uint64_t EvenRows(const Call& call, int size) {
  if (call.op != Collective::kAlltoall) return 0;
  Hash hash;
  const size_t per_tensor = 2 * static_cast<size_t>(size);
  for (size_t i = 0; i < call.rows.size(); ++i) {
    const int64_t first = call.rows[i / per_tensor * per_tensor];
    if (call.rows[i] != first) return 0;
    if (i % per_tensor == 0) hash.Add(static_cast<uint64_t>(first));
  }
  return std::max<uint64_t>(hash.value(), 1);
}

std::string Describe(DType dtype, std::span<const int64_t> dims, bool ragged) {
  std::string text(Name(dtype));
  text += '[';
  for (size_t d = 0; d < dims.size(); ++d) {
    if (d > 0) text += ',';
    text += d == 0 && ragged ? "*" : std::to_string(dims[d]);
  }
  return text + ']';
}

std::string Describe(const Tensor& tensor, bool ragged) {
  return Describe(tensor.dtype, {tensor.dims.begin(), tensor.dims.end()}, ragged);
}

std::string Digits(double value) {
  char text[32];
  return std::string(text, std::to_chars(text, text + sizeof text, value).ptr);
}

std::string_view Cut(std::string_view text, size_t limit) {
  if (text.size() <= limit) return text;
  while (limit > 0 && (text[limit] & 0xc0) == 0x80) --limit;  // UTF-8 continuation byte
  return text.substr(0, limit);
}

std::string_view Line(std::string_view lines, size_t number) {
  for (; number > 0; --number) {
    const size_t end = lines.find('\n');
    if (end == lines.npos) return {};
    lines.remove_prefix(end + 1);
  }
  return lines.substr(0, lines.find('\n'));
}

std::string Explain(const Call& call, size_t limit) {
  std::ostringstream out;
  out << call.Title() << '\n';
  out << "op=" << Name(call.reduce_op) << '\n';
  out << "root_rank=" << call.root << '\n';
  out << "wire="
      << (call.wire < 0 ? std::string_view("none")
                        : Name(static_cast<DType>(call.wire)))
      << '\n';
  out << "prescale_factor=" << Digits(call.prescale) << '\n';
  out << "postscale_factor=" << Digits(call.postscale) << '\n';
  out << kStep << call.step << '\n';
  out << "bucket " << call.bucket << '\n';
  out << (call.partition.empty() ? std::string_view("1 device")
                                 : call.partition.substr(0, call.partition.find('\n')))
      << '\n';
  out << call.tensors.size() << " tensors\n";
  const size_t per_tensor = call.tensors.empty() || call.op == Collective::kExchange
                                ? 0
                                : call.rows.size() / call.tensors.size();
  for (size_t i = 0; i < call.tensors.size(); ++i) {
    const std::string_view name = call.TensorName(i);
    if (!name.empty()) out << '\'' << name << "' ";
    out << Describe(call.tensors[i], RaggedRows(call.op));
    if (per_tensor > 0 && RowsAgree(call.op)) {
      out << " rows by rank";
      for (size_t r = 0; r < per_tensor; ++r)
        out << (r ? ',' : ' ') << call.rows[i * per_tensor + r];
    }
    out << '\n';
    if (static_cast<size_t>(out.tellp()) > limit) break;
  }
  const auto units = UnitsOf(call);
  if (!call.rows.empty() && units.size() + 1 == call.rows.size()) {
    out << call.rows[0] << " pieces\n";
    for (size_t leaf = 0; leaf < units.size(); ++leaf)
      out << "leaf " << leaf << " of " << call.rows[leaf + 1] << " elements, unit 2^"
          << units[leaf] << '\n';
  }
  return std::string(Cut(out.str(), limit));
}

bool IsRefusal(std::string_view text) {
  return text.substr(0, kRefused.size()) == kRefused;
}

std::string Refusal(const std::string& why) { return std::string(kRefused) + why; }

std::string Mismatch(const std::vector<std::string>& texts,
                     const std::vector<int>& members, std::string_view communicator,
                     int* culprit) {
  const int size = static_cast<int>(texts.size()), good = Reference(texts);
  int bad = 0;
  while (bad < size && texts[bad] == texts[good]) ++bad;
  for (int r = size - 1; r >= 0; --r)
    if (IsRefusal(texts[r])) bad = r;
  *culprit = bad < size ? members[bad] : -1;
  std::ostringstream out;
  out << Title(texts) << " (" << communicator << "): ";
  if (bad == size) {
    const long lines = std::count(texts[0].begin(), texts[0].end(), '\n');
    out << "ranks disagree about tensors beyond the first "
        << std::max(0L, lines - kHeadLines) << ". Nothing was exchanged.";
    return out.str();
  }
  if (IsRefusal(texts[bad])) {
    out << "rank " << members[bad]
        << " refused it: " << std::string_view(texts[bad]).substr(kRefused.size())
        << ". Nothing was exchanged.";
    return out.str();
  }
  const auto ours = Lines(texts[good]), theirs = Lines(texts[bad]);
  std::string_view a, b;
  for (size_t i = 0; i < std::max(ours.size(), theirs.size()); ++i) {
    a = i < ours.size() ? ours[i] : std::string_view("nothing more");
    b = i < theirs.size() ? theirs[i] : std::string_view("nothing more");
    if (a != b) break;
  }
  out << "ranks disagree: rank " << members[bad] << " sent " << b << ", rank "
      << members[good] << " sent " << a << ". Nothing was exchanged.";
  if (a.substr(0, kStep.size()) == kStep)
    out << " Did a rank skip a step (a guard against NaN belongs behind"
           " allreduce_grads, not around it), or restore another checkpoint?";
  return out.str();
}

}  // namespace ringjax
