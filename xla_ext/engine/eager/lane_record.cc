// What the lane tells a timeline. The negotiation hears from every rank, so one rank's
// file shows when each of them was ready.
#include "engine/eager/lane.h"

namespace ringjax {

NegotiationOptions EagerLane::ForNegotiation() {
  NegotiationOptions n;
  n.rank = communicator_->rank();
  n.size = communicator_->size();
  n.members = communicator_->options().members;
  n.fusion_threshold = options_.fusion_threshold;
  n.cache_capacity = options_.cache_capacity;
  n.prefix = communicator_->Prefix();
  n.on_submission = [this](const Submission& s, int rank) {
    if (recording_)
      recording_->Submitted(RowOf(s), communicator_->options().members[rank]);
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

}  // namespace ringjax
