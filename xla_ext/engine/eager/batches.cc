// Implements Batches: puts each operation into the first Call of its kind that still
// accepts tensors and has room. See batches.h.
#include "engine/eager/batches.h"

#include <algorithm>
#include <utility>

namespace ringjax {
namespace {

// The most Calls of one kind that stay open for later operations. Without this limit,
// every operation after thousands of large tensors would search thousands of almost
// full Calls.
constexpr size_t kMaxOpen = 8;

uint64_t BytesOf(const Submission& submission) {
  uint64_t bytes = 0;
  for (const Submission::Piece& piece : submission.tensors) bytes += piece.bytes();
  return bytes;
}

// Returns the bytes that an operation adds to a Call: for an allgather, the sum over
// all ranks, which may contribute different sizes; otherwise the size of one rank's
// tensors.
uint64_t BytesOf(const Ready& ready) {
  if (ready.any->op != Collective::kAllgather) return BytesOf(*ready.any);
  uint64_t bytes = 0;
  for (size_t r = 0; r < ready.by_rank.size(); ++r)
    if (ready.by_rank[r]) bytes += BytesOf(*ready.by_rank[r]);
  return bytes;
}

bool Fuses(const Ready& ready) {
  if (ready.any->op == Collective::kAlltoall || ready.any->op == Collective::kBarrier)
    return false;
  return ready.by_rank.AllOf([](const SubmissionPtr& s) { return !s || !s->alone; });
}

}  // namespace

bool Batches::Kind::operator==(const Kind& other) const {
  return kinds == other.kinds && SameBits(prescale, other.prescale) &&
         SameBits(postscale, other.postscale);
}

Batches::Kind Batches::KindOf(const Submission& s) {
  Kind kind;
  kind.kinds = static_cast<uint64_t>(s.op) | static_cast<uint64_t>(s.cuda) << 8;
  if (s.op == Collective::kBroadcast)
    kind.kinds |= static_cast<uint64_t>(static_cast<uint32_t>(s.root)) << 32;
  if (s.Reduces()) {
    kind.kinds |= static_cast<uint64_t>(s.reduce_op) << 16;
    kind.prescale = s.prescale;
    kind.postscale = s.postscale;
  }
  return kind;
}

void Batches::AppendCall(Ready&& ready) {
  decisions_->emplace_back().fused.emplace_back(std::move(ready));
}

void Batches::Add(Ready&& ready) {
  const uint64_t bytes = BytesOf(ready);
  if (threshold_ == 0 || bytes > threshold_ || !Fuses(ready))
    return AppendCall(std::move(ready));
  const Kind kind = KindOf(*ready.any);
  size_t of_kind = 0;
  auto fullest = open_.end();
  for (auto bin = open_.begin(); bin != open_.end(); ++bin) {
    if (!(bin->kind == kind)) continue;
    if (bytes <= threshold_ - bin->bytes) {
      bin->bytes += bytes;
      (*decisions_)[bin->decision].fused.emplace_back(std::move(ready));
      return;
    }
    ++of_kind;
    if (fullest == open_.end() || bin->bytes > fullest->bytes) fullest = bin;
  }
  if (of_kind == kMaxOpen) {
    std::move(fullest + 1, open_.end(), fullest);
    open_.pop_back();
  }
  open_.push_back({kind, decisions_->size(), bytes});
  AppendCall(std::move(ready));
}

}  // namespace ringjax
