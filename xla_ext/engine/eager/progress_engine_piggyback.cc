// Piggybacking: if a rank submits one short operation and nothing else, it sends the
// data of that operation together with the round that negotiates it. If all other ranks
// submit the same operation and nothing else, every rank has all data after the round,
// and the call, which would be a second exchange, is left out. So in a program that
// waits for each of its operations, most operations take one exchange. In all other
// cases a copy of a few KiB is wasted.
#include <functional>

#include "engine/eager/progress_engine.h"

namespace ringjax {
namespace {

// The longest data that are piggybacked, in bytes. For longer data, a wasted copy would
// take too long.
constexpr uint64_t kMaxPiggyback = 8 << 10;
// This limit applies if the caller waits for the operation: then the other ranks
// probably submit the same operation, and the copy is probably not wasted.
constexpr uint64_t kMaxPiggybackIfWaits = 64 << 10;

// Returns whether the operation is short enough, and whether each rank can compute the
// same bits as a call from the inputs of all ranks.
bool Qualifies(const Submission& s, bool waits) {
  const uint64_t most =
      waits && s.op != Collective::kAllreduce ? kMaxPiggybackIfWaits : kMaxPiggyback;
  if (s.cuda || s.tensors.size() != 1 || s.tensors[0].bytes() > most) return false;
  switch (s.op) {
    case Collective::kAllreduce:
    case Collective::kReducescatter:
      return s.prescale == 1 && s.reduce_op != ReduceOp::kAdasum;
    case Collective::kBroadcast:
    case Collective::kAllgather:
      return true;
    case Collective::kAlltoall:
      return s.splits.empty();
    case Collective::kBarrier:
      break;
  }
  return false;
}

bool ShareMemory(const std::byte* a, uint64_t a_bytes, const std::byte* b,
                 uint64_t b_bytes) {
  return std::less<>()(a, b + b_bytes) && std::less<>()(b, a + a_bytes);
}

// Excludes the share of the data that only this rank needs from the copy, unless the
// result overwrites the input.
void ExcludeOwnShare(const Submission& s, const void* out, int rank, int size,
                     Piggyback* piggyback) {
  if (s.op != Collective::kAlltoall && s.op != Collective::kReducescatter) return;
  const uint64_t bytes = piggyback->own.size();
  if (bytes == 0 ||
      ShareMemory(piggyback->own.data(), bytes, static_cast<const std::byte*>(out),
                  ResultBytes(s, 0, rank, size)))
    return;
  const int64_t rows = s.tensors[0].dims[0];
  int64_t before = 0;
  for (int r = 0; r < rank; ++r) before += ShareOf(rows, r, size);
  const uint64_t row = bytes / static_cast<uint64_t>(rows);
  piggyback->kept_begin = static_cast<uint64_t>(before) * row;
  piggyback->kept_end = static_cast<uint64_t>(before + ShareOf(rows, rank, size)) * row;
}

}  // namespace

Piggyback ProgressEngine::OfferData() const {
  Piggyback piggyback;
  const auto task =
      std::static_pointer_cast<const Task>(negotiation_->OnlySubmission());
  if (!task || !Qualifies(*task, task->waits) ||
      !communicator_->rounds().CanPiggyback(task->op))
    return piggyback;
  piggyback.given = true;
  if (task->op != Collective::kBroadcast || task->root == communicator_->rank())
    piggyback.own = {static_cast<const std::byte*>(task->ins[0]),
                     task->tensors[0].bytes()};
  ExcludeOwnShare(*task, task->outs.empty() ? nullptr : task->outs[0],
                  communicator_->rank(), communicator_->size(), &piggyback);
  return piggyback;
}

}  // namespace ringjax
