// Reports of the lane to the recorder and to a timeline. The negotiation receives all
// ranks' submissions, so one rank's timeline shows when each rank was ready.
#include "engine/eager/lane.h"

namespace ringjax {

NegotiationOptions EagerLane::ForNegotiation() {
  NegotiationOptions n;
  n.rank = communicator_->rank();
  n.size = communicator_->size();
  n.members = communicator_->options().world_ranks;
  n.fusion_threshold = options_.fusion_threshold;
  n.cache_capacity = options_.cache_capacity;
  n.prefix = communicator_->Prefix();
  n.on_submission = [this](const Submission& s, int rank) {
    if (recording_)
      recording_->Submitted(RowOf(s), communicator_->options().world_ranks[rank]);
  };
  return n;
}

void EagerLane::set_timeline(std::shared_ptr<Timeline> timeline) {
  std::lock_guard lock(mutex_);
  timeline_ = std::move(timeline);
}

Timeline::Row EagerLane::RowOf(const Submission& s) const {
  const std::string& set = communicator_->options().name;
  return {set == "world" ? "" : std::string_view(set), Name(s.op), s.name};
}

void EagerLane::RecordRun(const Decision& decision) const {
  if (!recording_) return;
  for (const Ready& ready : decision.fused) recording_->Runs(RowOf(*ready.any));
}

void EagerLane::RecordEnd(const Decision& decision, const Status& status) const {
  if (!recording_) return;
  for (const Ready& ready : decision.fused) {
    const Submission& s = *ready.any;
    if (!status.ok())
      recording_->Failed(RowOf(s), status.message());
    else
      recording_->Ended(RowOf(s), s.Describe());
  }
}

void EagerLane::Report(const std::vector<TaskPtr>& tasks, Clock::time_point agreed,
                       const Status& status) const {
  const auto& recorder = communicator_->options().recorder;
  if (!recorder) return;
  Event event =
      communicator_->log().event();  // the call that the tasks were part of, if any
  event.agreed = agreed;
  event.done = Clock::now();
  event.named = true;
  event.outcome = status.code();
  event.set = communicator_->options().process_set;
  event.epoch = communicator_->epoch();
  event.sequence = communicator_->entered();
  for (const TaskPtr& task : tasks) {
    event.op = task->op;
    event.device = task->cuda;
    event.entered = task->since;
    event.bytes = 0;
    for (const Submission::Piece& piece : task->tensors) event.bytes += piece.bytes();
    event.SetName(task->name);
    recorder->Add(event);
  }
}

}  // namespace ringjax
