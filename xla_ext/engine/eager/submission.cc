// Implements Submission, and the functions that check and measure submissions. See
// submission.h.
#include "engine/eager/submission.h"

#include <algorithm>
#include <numeric>

#include "engine/call/hash.h"

namespace ringjax {
namespace {

// The largest submission in bytes. The limit keeps sums over tensors and ranks from
// overflowing.
constexpr uint64_t kMaxBytes = uint64_t{1} << 48;

Status Invalid(const std::string& why) { return {Code::kInvalidArgument, why}; }

// Adds the bytes of a tensor to `*total`. Returns false if a dimension is negative or
// the bytes exceed kMaxBytes. A dimension of 0 counts as 1, so that the other
// dimensions are limited, too.
bool Possible(const Submission::Piece& piece, uint64_t* total) {
  uint64_t bytes = Width(piece.dtype);
  for (int64_t d : piece.dims) {
    if (d < 0) return false;
    const auto factor = static_cast<uint64_t>(std::max<int64_t>(d, 1));
    if (__builtin_mul_overflow(bytes, factor, &bytes) || bytes > kMaxBytes)
      return false;
  }
  *total += bytes;
  return *total <= kMaxBytes;
}

bool HasRows(Collective op) {
  return RaggedRows(op) || op == Collective::kReducescatter;
}

Status CheckSplits(const Submission& s, size_t ranks) {
  if (!s.splits.empty() && s.splits.size() != ranks * s.tensors.size())
    return Invalid(std::to_string(s.splits.size()) + " splits for " +
                   std::to_string(s.tensors.size()) + " tensors and " +
                   std::to_string(ranks) + " ranks");
  for (size_t i = 0; i < s.tensors.size(); ++i) {
    const int64_t rows = s.tensors[i].dims[0];
    if (s.splits.empty()) {
      if (rows % static_cast<int64_t>(ranks) == 0) continue;
      return Invalid("dim 0 of " + Describe(s.tensors[i]) + " is not a multiple of " +
                     std::to_string(ranks) + " ranks; pass splits");
    }
    int64_t left = rows;
    for (size_t r = 0; r < ranks; ++r) {
      const int64_t part = s.splits[i * ranks + r];
      if (part < 0) return Invalid("a split is negative");
      left = part > left ? -1 : left - part;
      if (left < 0) break;
    }
    if (left != 0)
      return Invalid("splits do not sum to the rows of " + Describe(s.tensors[i]));
  }
  return OkStatus();
}

}  // namespace

uint64_t Submission::Piece::bytes() const {
  return std::accumulate(
      dims.begin(), dims.end(), uint64_t{Width(dtype)},
      [](uint64_t n, int64_t d) { return n * static_cast<uint64_t>(d); });
}

std::string Submission::Title() const {
  std::string title(Name(op));
  if (!name.empty()) title.append(" '").append(name).append("'");
  return title;
}

std::string Submission::Describe() const {
  std::string what;
  if (!tensors.empty()) what = ringjax::Describe(tensors[0], RaggedRows(op));
  if (tensors.size() > 1)
    what += " and " + std::to_string(tensors.size() - 1) + " more";
  if (Reduces()) what.append(", ").append(Name(reduce_op));
  return what.empty() ? Title() : Title() + " (" + what + ")";
}

bool Submission::Reduces() const {
  return op == Collective::kAllreduce || op == Collective::kReducescatter;
}

bool Submission::Same(const Submission& other) const {
  return op == other.op && reduce_op == other.reduce_op && root == other.root &&
         SameBits(prescale, other.prescale) && SameBits(postscale, other.postscale) &&
         cuda == other.cuda && alone == other.alone && placed == other.placed &&
         name == other.name && tensors == other.tensors && splits == other.splits;
}

uint64_t Submission::Hash() const {
  ringjax::Hash hash;
  hash.Add(static_cast<uint64_t>(op) | static_cast<uint64_t>(reduce_op) << 8 |
           static_cast<uint64_t>(cuda) << 16 | static_cast<uint64_t>(alone) << 17 |
           static_cast<uint64_t>(placed) << 18 |
           static_cast<uint64_t>(static_cast<uint32_t>(root)) << 32);
  hash.Add(prescale);
  hash.Add(postscale);
  hash.Add(name);
  hash.Add(tensors.size());
  for (const Piece& piece : tensors) {
    hash.Add(static_cast<uint64_t>(piece.dtype) | piece.dims.size() << 8);
    for (int64_t d : piece.dims) hash.Add(static_cast<uint64_t>(d));
  }
  for (int64_t rows : splits) hash.Add(static_cast<uint64_t>(rows));
  return hash.value();
}

int64_t ShareOf(int64_t rows, int rank, int size) {
  return rows / size + (rank < rows % size ? 1 : 0);
}

uint64_t ResultBytes(const Submission& s, size_t i, int rank, int size) {
  const uint64_t all = s.tensors[i].bytes();
  if (s.op != Collective::kReducescatter || all == 0) return all;
  const int64_t rows = s.tensors[i].dims[0];
  return all / static_cast<uint64_t>(rows) *
         static_cast<uint64_t>(ShareOf(rows, rank, size));
}

Status CheckSubmission(const Submission& s, int size) {
  const bool barrier = s.op == Collective::kBarrier;
  if (barrier != s.tensors.empty())
    return Invalid(barrier ? "a barrier has no tensors" : "there are no tensors");
  if (s.root < 0 || s.root >= size)
    return Invalid("root rank " + std::to_string(s.root) + " is not in 0.." +
                   std::to_string(size - 1));
  uint64_t bytes = 0;
  for (const Submission::Piece& piece : s.tensors) {
    if (!Possible(piece, &bytes))
      return Invalid(Describe(piece) + " is beyond any memory");
    if (HasRows(s.op) && piece.dims.empty())
      return Invalid("a tensor without dimensions has no rows");
    if (s.Reduces()) RJ_TRY(CheckReduction(s.op, s.reduce_op, piece.dtype, size));
  }
  if (s.op == Collective::kAlltoall) return CheckSplits(s, static_cast<size_t>(size));
  if (!s.splits.empty()) return Invalid("only alltoall has splits");
  return OkStatus();
}

std::string Describe(const Submission::Piece& piece, bool ragged) {
  return Describe(piece.dtype, piece.dims, ragged);
}

}  // namespace ringjax
