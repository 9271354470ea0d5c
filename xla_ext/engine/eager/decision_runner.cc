// Implements DecisionRunner: carries out what the negotiation decides in a round, which
// is one exchange of messages. See decision_runner.h.
//
// In an elastic job, an operation must end with the same outcome on all ranks that
// remain after a failure. The coordinator's commit decision ensures this for calls, but
// not for rounds. So an outcome that follows from a round alone (a barrier, a mismatch,
// a join) is reported only after a barrier call (ConfirmRound). If no epoch can follow,
// the barrier call is skipped (Rounds::final).
#include "engine/eager/decision_runner.h"

#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>
#include <utility>

namespace ringjax {

DecisionRunner::DecisionRunner(LaneState& state, TaskQueue& tasks,
                               const LaneRecord& record)
    : state_(state),
      communicator_(state.communicator),
      tasks_(tasks),
      record_(record),
      builder_(state) {}

Status DecisionRunner::RunAll(const std::vector<Decision>& decisions,
                              const Piggyback* values) {
  round_confirmed_ = communicator_->rounds().final();
  for (const Decision& decision : decisions) RJ_TRY(RunDecision(decision, values));
  return OkStatus();
}

Status DecisionRunner::RunDecision(const Decision& decision, const Piggyback* values) {
  switch (decision.kind) {
    case Decision::Kind::kRun:
      return RunCall(decision, values);
    case Decision::Kind::kFail:
      RJ_TRY(ConfirmRound());
      record_.RecordEnd(decision, decision.status);
      if (const TaskPtr task = Mine(decision.fused[0], communicator_->rank()))
        tasks_.Finish({&task, 1}, decision.status, nullptr);
      break;
    case Decision::Kind::kJoined:
      RJ_TRY(ConfirmRound());
      tasks_.FinishJoin(OkStatus(), decision.last_joined);
      break;
  }
  return OkStatus();
}

// Makes sure that all ranks have received the messages of this round. Runs a barrier
// call for this purpose, unless an earlier call of the round has already shown it.
Status DecisionRunner::ConfirmRound() {
  if (round_confirmed_) return OkStatus();
  Call call;
  call.op = Collective::kBarrier;
  call.name = "end of a round of eager operations";
  RJ_TRY(communicator_->RunInThisEpoch(call));
  round_confirmed_ = true;
  return OkStatus();
}

// Redirects the results of in-place allreduces to scratch memory. In an elastic job, a
// call runs again if the loss of a rank interrupts it, so it must not overwrite its
// inputs. RunCall copies the results to their final addresses when all ranks have them.
// The scratch memory is as large as the largest batch so far and is kept, because
// touching new pages would take longer than the copy. A broadcast needs no scratch
// memory, because its root, the only rank with an input, writes no result.
Status DecisionRunner::MoveAside(Batch* batch) {
  std::vector<Tensor>& tensors = batch->call.tensors;
  const auto room = [](const Tensor& t) {
    return (t.room + Batch::kAlign - 1) / Batch::kAlign * Batch::kAlign;
  };
  uint64_t bytes = 0;
  for (const auto& [i, out] : batch->aside) bytes += room(tensors[i]);
  if (bytes > scratch_.size) {
    void* memory = nullptr;
    scratch_ = {};  // before the allocation, so that only one of the two exists
    if (posix_memalign(&memory, Batch::kAlign, bytes) != 0)
      return Status(Code::kInternal, "no memory to reduce " + std::to_string(bytes) +
                                         " bytes in place in an elastic job");
    scratch_ = {{static_cast<std::byte*>(memory), std::free}, bytes};
  }
  std::byte* next = scratch_.memory.get();
  for (const auto& [i, out] : batch->aside) {
    tensors[i].out = next;
    next += room(tensors[i]);
  }
  return OkStatus();
}

Status DecisionRunner::OpenDevice(const Submission& first) {
  const Status status = state_.cuda
                            ? state_.cuda->Open()
                            : Status(Code::kFailedPrecondition, "no CUDA device");
  if (status.ok() || status.message().starts_with("RINGJAX[")) return status;
  return state_.WithContext(first.Title(), status);
}

// Returns whether a call that returned `status` has no outcome, because the epoch was
// aborted during the call: `status` is the error of the abort, or of a failed wait for
// the commit decision. Otherwise all ranks have the same outcome, even if the epoch was
// aborted after the call.
bool DecisionRunner::IsLost(const Status& status) const {
  const Code code = status.code();
  return communicator_->aborted() &&
         (code == communicator_->abort_status().code() || code == Code::kUnavailable ||
          code == Code::kCancelled);
}

// Builds the call of a decision. Then runs the call, or computes its results from
// `values`, the data that all ranks sent with the round, which ended at `agreed`.
Status DecisionRunner::RunOrComplete(const Decision& decision, const Piggyback* values,
                                     Clock::time_point agreed, Batch* batch) {
  const Submission& first = *decision.fused[0].any;
  Status built = builder_.Build(decision, batch);
  if (built.ok() && !batch->aside.empty()) built = MoveAside(batch);
  if (values != nullptr)  // no other rank waits for this rank, even if building failed
    return built.ok() ? communicator_->rounds().RunPiggybacked(
                            batch->call, &batch->kept.requests, values->all, agreed)
                      : communicator_->WithContext(batch->call, built);
  if (first.cuda) {
    bool refused = false;
    RJ_TRY(communicator_->Compare(batch->call, built, &refused));
    return state_.cuda->Run(batch->call, batch->marks, &batch->end);
  }
  const bool negotiated = communicator_->rounds().final() && decision.IsPlaced();
  if (!negotiated || built.ok())
    return communicator_->RunInThisEpoch(batch->call, built, negotiated);
  // This rank could not build the call, most likely for lack of memory. The other ranks
  // start the call without an agreement, so this rank aborts the communicator.
  communicator_->AbortAndNotifyPeers(built.code(),
                                     batch->kept.name + " failed: " + built.message());
  return communicator_->WithContext(batch->call, communicator_->abort_status());
}

Status DecisionRunner::RunCall(const Decision& decision, const Piggyback* values) {
  Batch batch(&kept_);
  for (const Ready& ready : decision.fused) {
    TaskPtr task = Mine(ready, communicator_->rank());
    if (!task) continue;
    if (task->cuda) batch.marks.push_back(task->mark);
    batch.tasks.push_back(std::move(task));
  }
  const Submission& first = *decision.fused[0].any;
  if (RaggedRows(first.op)) batch.outputs.resize(batch.tasks.size());
  Status status, lost;
  const auto agreed = Clock::now();
  record_.RecordRun(decision);
  // A barrier ends as soon as all ranks have submitted it, so there is no call to run.
  const bool runs = first.op != Collective::kBarrier;
  if (runs && first.cuda) status = OpenDevice(first);
  if (runs && status.ok()) {
    status = RunOrComplete(decision, values, agreed, &batch);
    // A call that has an outcome proves that all ranks have received this round. A call
    // on a device has no commit decision and needs none, because it fails on all ranks
    // if a rank is lost.
    if (IsLost(status)) lost = status;
    round_confirmed_ = true;
  }
  if (lost.ok()) lost = ConfirmRound();
  if (!lost.ok()) {
    // The tasks stay pending: they are submitted again in the next epoch, or they fail
    // together with all other pending tasks.
    record_.RecordEnd(decision, lost);
    return lost;
  }
  for (const auto& [i, out] : batch.aside)
    if (status.ok())
      std::memcpy(out, batch.call.tensors[i].out, batch.call.tensors[i].room);
  record_.RecordEnd(decision, status);
  record_.Report(batch.tasks, agreed, status);
  ++state_.stats.calls;
  if (values != nullptr) ++state_.stats.piggybacked;
  state_.stats.fused += batch.tasks.size();
  const bool has_outputs = status.ok() && !batch.outputs.empty();
  tasks_.Finish(batch.tasks, status, has_outputs ? &batch.outputs : nullptr, batch.end);
  return OkStatus();
}

}  // namespace ringjax
