// Values beside the news: a short operation that is all that this rank submits gives
// its inputs with its news. If it is all that every other rank submits, too, that round
// was all: the call, which would be one more exchange, is left out. So the usual step
// of a program that waits for its operations takes one exchange, and anything else
// costs the copy of a few KiB that nobody reads.
#include <functional>

#include "engine/eager/lane.h"

namespace ringjax {
namespace {

// Bytes. More are not worth copying for nothing, or are summed up faster in parts.
constexpr uint64_t kMost = 8 << 10;
constexpr uint64_t kMostIfWaits = 64 << 10;  // likely that all others submit it, too

// Whether inputs as they are, and known to all, are enough for the very bits that a
// call would find.
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

// The part for this rank itself need not travel, if the result goes elsewhere.
void Keep(const Submission& s, const void* out, int rank, int size, Beside* beside) {
  if (s.op != Collective::kAlltoall && s.op != Collective::kReducescatter) return;
  const uint64_t bytes = beside->own.size();
  if (bytes == 0 ||
      ShareMemory(beside->own.data(), bytes, static_cast<const std::byte*>(out),
                  ResultBytes(s, 0, rank, size)))
    return;
  const int64_t rows = s.tensors[0].dims[0];
  int64_t before = 0;
  for (int r = 0; r < rank; ++r) before += ShareOf(rows, r, size);
  const uint64_t row = bytes / static_cast<uint64_t>(rows);
  beside->kept_begin = static_cast<uint64_t>(before) * row;
  beside->kept_end = static_cast<uint64_t>(before + ShareOf(rows, rank, size)) * row;
}

}  // namespace

Beside EagerLane::Offer() const {
  Beside beside;
  const auto task = std::static_pointer_cast<const Task>(negotiation_->Lone());
  if (!task || !Qualifies(*task, task->waits) || !communicator_->HasBeside(task->op))
    return beside;
  beside.given = true;
  if (task->op != Collective::kBroadcast || task->root == communicator_->rank())
    beside.own = {static_cast<const std::byte*>(task->ins[0]),
                  task->tensors[0].bytes()};
  Keep(*task, task->outs.empty() ? nullptr : task->outs[0], communicator_->rank(),
       communicator_->size(), &beside);
  return beside;
}

}  // namespace ringjax
