// Values beside the news: a short operation that is all that this rank submits gives
// its inputs with its news. If it is all that every other rank submits, too, that round
// was all: the call, which would be one more exchange, is left out. So the usual step
// of a program that waits for its operations takes one exchange, and anything else
// costs the copy of a few KiB that nobody reads.
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
  return beside;
}

}  // namespace ringjax
