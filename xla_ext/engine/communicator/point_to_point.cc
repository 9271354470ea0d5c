// Runs a plan that has one step for each message. See point_to_point.h.
#include "engine/communicator/point_to_point.h"

#include <algorithm>
#include <string>

#include "collective/schedule.h"
#include "engine/call/executor.h"
#include "engine/call/plan.h"

namespace ringjax {
namespace {

// Adds a step for each message, and the memory of the messages to `memory`.
void AddSteps(std::span<const PointToPoint::Message> messages, StepKind kind,
              Schedule* schedule, Spans* memory) {
  const Region region = kind == StepKind::kSend ? Region::kIn : Region::kOut;
  for (const PointToPoint::Message& message : messages) {
    const Slice slice{region, memory->bytes(), message.bytes};
    Step step{kind, message.peer, {}, {}};
    (kind == StepKind::kSend ? step.src : step.dst) = slice;
    schedule->steps.push_back(step);
    memory->Add(message.data, message.bytes);
  }
}

}  // namespace

Status PointToPoint::Exchange(std::span<const Message> sends,
                              std::span<const Message> receives,
                              std::string_view name) {
  Call call;
  call.op = Collective::kAlltoall;
  call.name = call.jax_op = name;
  return communicator_.runner_.InTurn(call,
                                      [&] { return Move(call, sends, receives); });
}

Status PointToPoint::Move(const Call& call, std::span<const Message> sends,
                          std::span<const Message> receives) {
  CommState& state = communicator_.state_;
  Schedule schedule;
  Spans in, out;
  AddSteps(sends, StepKind::kSend, &schedule, &in);
  AddSteps(receives, StepKind::kRecv, &schedule, &out);
  const Plan plan = Compile(schedule, state.size(), false);
  communicator_.log_.EnterAgreed(Event::Clock::now());
  // The frame has no sequence number, because ranks would have different ones.
  Frame frame;
  communicator_.runner_.Prepare(call, &frame);
  Buffers buffers;
  buffers.in = &in;
  buffers.out = &out;
  Arithmetic bytes;
  bytes.dtype = bytes.wire = DType::kU8;
  Waiter waiter = state.NewWaiter();
  const Status moved = Execute(plan, buffers, bytes, frame, state.endpoints, &waiter);
  if (!moved.ok()) return communicator_.failures_.Fail(call, moved);
  communicator_.log_.Exchanged(call, std::max(in.bytes(), out.bytes()));
  return moved;
}

}  // namespace ringjax
