// Piggybacking: if a rank submits one short operation and nothing else, it sends the
// data of that operation together with the round that negotiates it. If all other ranks
// submit the same operation and nothing else, the data of all ranks are there after the
// round, and the call, which would be a second exchange, is left out. So the usual
// operation of a program that waits for each of its operations takes one exchange. In
// any other case a copy of a few KiB is wasted.
#include <functional>

#include "engine/eager/progress_engine.h"

namespace ringjax {
namespace {

// Limits in bytes. Beyond them, a copy in vain costs too much, and a call is faster.
constexpr uint64_t kMost = 8 << 10;
// The limit if the caller waits: the other ranks then probably submit the same
// operation.
constexpr uint64_t kMostIfWaits = 64 << 10;

// Whether each rank can compute, from the inputs of all ranks, the same bits as a call.
bool Qualifies(const Submission& s, bool waits) {
  const uint64_t most = waits && s.op != Collective::kAllreduce ? kMostIfWaits : kMost;
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

// Excludes the share that this rank keeps for itself from the data that are sent,
// unless the result overwrites the input.
void Keep(const Submission& s, const void* out, int rank, int size,
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

Piggyback ProgressEngine::Offer() const {
  Piggyback piggyback;
  const auto task = std::static_pointer_cast<const Task>(negotiation_->Lone());
  if (!task || !Qualifies(*task, task->waits) ||
      !communicator_->rounds().CanPiggyback(task->op))
    return piggyback;
  piggyback.given = true;
  if (task->op != Collective::kBroadcast || task->root == communicator_->rank())
    piggyback.own = {static_cast<const std::byte*>(task->ins[0]),
                     task->tensors[0].bytes()};
  Keep(*task, task->outs.empty() ? nullptr : task->outs[0], communicator_->rank(),
       communicator_->size(), &piggyback);
  return piggyback;
}

}  // namespace ringjax
