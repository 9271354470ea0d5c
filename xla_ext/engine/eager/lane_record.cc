// Reports the operations of an eager lane to the recorder and to a timeline. See
// lane_record.h.
#include "engine/eager/lane_record.h"

#include <mutex>
#include <string_view>
#include <utility>

namespace ringjax {

LaneRecord::LaneRecord(LaneState& state)
    : state_(state), communicator_(state.communicator) {}

void LaneRecord::set_timeline(std::shared_ptr<Timeline> timeline) {
  std::lock_guard lock(state_.mutex);
  timeline_ = std::move(timeline);
  is_new_.store(true, std::memory_order_release);
}

void LaneRecord::BeginRound() {
  if (is_new_.load(std::memory_order_acquire)) {
    std::lock_guard lock(state_.mutex);
    recording_ = timeline_;
    is_new_.store(false, std::memory_order_relaxed);
  }
  if (recording_) recording_->Round();
}

Timeline::Row LaneRecord::RowOf(const Submission& s) const {
  const std::string& set = communicator_->options().name;
  return {set == "world" ? "" : std::string_view(set), Name(s.op), s.name};
}

void LaneRecord::RecordRun(const Decision& decision) const {
  if (!recording_) return;
  for (const Ready& ready : decision.fused) recording_->Runs(RowOf(*ready.any));
}

void LaneRecord::RecordEnd(const Decision& decision, const Status& status) const {
  if (!recording_) return;
  for (const Ready& ready : decision.fused) {
    const Submission& s = *ready.any;
    if (!status.ok())
      recording_->Failed(RowOf(s), status.message());
    else
      recording_->Ended(RowOf(s), s.Describe());
  }
}

void LaneRecord::Failed(const Submission& s, const std::string& why) const {
  if (recording_) recording_->Failed(RowOf(s), why);
}

void LaneRecord::Report(std::span<const TaskPtr> tasks, Clock::time_point agreed,
                        const Status& status) const {
  const auto& recorder = communicator_->options().recorder;
  if (!recorder) return;
  Event event =
      communicator_->log().event();  // the event of the call that ran the tasks, if any
  event.agreed = agreed;
  // A call reads the clock when it ends, but not if a device runs it, or if it fails.
  if (!status.ok() || event.device || event.done < agreed) event.done = Clock::now();
  event.lane = Lane::kNamed;
  event.outcome = status.code();
  event.set = communicator_->options().process_set;
  event.epoch = communicator_->epoch();
  event.sequence = communicator_->entered();
  for (const TaskPtr& task : tasks) {
    event.op = Name(task->op);
    event.device = task->cuda;
    event.entered = task->since;
    event.bytes = 0;
    for (const Submission::Piece& piece : task->tensors) event.bytes += piece.bytes();
    event.SetName(task->name);
    recorder->Add(event);
  }
}

}  // namespace ringjax
