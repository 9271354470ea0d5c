// The check of a submission together with its memory. See task.h.
#include "engine/eager/task.h"

#include <string>

namespace ringjax {

Status CheckTask(const Submission& what, std::span<void* const> ins,
                 std::span<void* const> outs, std::span<const uint64_t> rooms,
                 const Communicator& present) {
  auto invalid = [](const std::string& text) {
    return Status(Code::kInvalidArgument, text);
  };
  RJ_TRY(CheckSubmission(what, present.size()));
  const bool makes = what.op == Collective::kAllgather ||
                     what.op == Collective::kAlltoall ||
                     what.op == Collective::kBarrier;
  const bool places = !makes || !rooms.empty();
  if (ins.size() != what.tensors.size() || outs.size() != (places ? ins.size() : 0) ||
      (!rooms.empty() && rooms.size() != outs.size()))
    return invalid("inputs and results differ in number");
  for (size_t i = 0; i < ins.size(); ++i) {
    const Submission::Piece& piece = what.tensors[i];
    // If there are fewer rows than ranks, the last ranks receive none and need no
    // memory.
    const bool gets =
        what.op != Collective::kReducescatter || piece.dims[0] > present.rank();
    if (piece.bytes() > 0 &&
        (ins[i] == nullptr || (!makes && gets && outs[i] == nullptr)))
      return invalid("tensor " + std::to_string(i) + " has no memory");
    const uint64_t needed =
        makes ? 0 : ResultBytes(what, i, present.rank(), present.size());
    if (!makes && !rooms.empty() && rooms[i] != needed)
      return invalid("the result of tensor " + std::to_string(i) + " has " +
                     std::to_string(needed) + " bytes, and its place " +
                     std::to_string(rooms[i]));
  }
  return OkStatus();
}

}  // namespace ringjax
