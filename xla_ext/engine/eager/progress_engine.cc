// Turns and rounds. See progress_engine.h.
#include "engine/eager/progress_engine.h"

#include <algorithm>
#include <chrono>
#include <mutex>
#include <string>

namespace ringjax {
namespace {

Clock::duration Seconds(double seconds) {
  return std::chrono::duration_cast<Clock::duration>(
      std::chrono::duration<double>(seconds));
}

}  // namespace

ProgressEngine::ProgressEngine(LaneState& state, TaskQueue& tasks, LaneRecord& record)
    : state_(state),
      communicator_(state.communicator),
      tasks_(tasks),
      record_(record),
      runner_(state, tasks, record),
      stalls_(state),
      negotiation_(std::make_unique<Negotiation>(ForNegotiation())) {}

NegotiationOptions ProgressEngine::ForNegotiation() {
  NegotiationOptions n;
  n.rank = communicator_->rank();
  n.size = communicator_->size();
  n.members = communicator_->options().world_ranks;
  n.fusion_threshold = state_.options.fusion_threshold;
  n.cache_capacity = state_.options.cache_capacity;
  n.prefix = communicator_->Prefix();
  n.on_submission = [this](const Submission& s, int rank) {
    record_.Submitted(s, rank);
  };
  return n;
}

Status ProgressEngine::Turn(Clock::time_point until, bool takes_submissions) {
  if (takes_submissions) TakeSubmissions();
  if (Clock::now() >= stalls_.next_look()) stalls_.Watch(negotiation_.get());
  if (negotiation_->HasItems()) {
    RJ_TRY(AwaitMore());
    return Round();
  }
  bool begun = false, required;
  {
    std::lock_guard lock(state_.mutex);
    required = tasks_.pending();
  }
  RJ_TRY(communicator_->rounds().AwaitNext(std::min(until, stalls_.next_look()),
                                           required, &begun));
  if (!begun) return OkStatus();
  TakeSubmissions();
  return Round();
}

void ProgressEngine::TakeSubmissions() {
  const bool joins = tasks_.Take(&taken_);
  for (const TaskPtr& task : taken_) {
    stalls_.OnTaken(*task);
    negotiation_->Submit(task);
  }
  taken_.clear();
  if (joins) negotiation_->Join();
}

// Waits cycle_seconds for more submissions to fuse, or until a peer begins the round.
Status ProgressEngine::AwaitMore() {
  if (state_.options.cycle_seconds <= 0) return OkStatus();
  const auto until = Clock::now() + Seconds(state_.options.cycle_seconds);
  for (bool begun = false; !begun && Clock::now() < until;) {
    RJ_TRY(communicator_->rounds().AwaitNext(until, true, &begun));
    TakeSubmissions();
  }
  return OkStatus();
}

Status ProgressEngine::Round() {
  record_.BeginRound();
  Piggyback piggyback = OfferData();
  const std::string message = negotiation_->TakeMessage();
  const uint64_t first_id = negotiation_->next_id();
  std::vector<std::string> messages;
  RJ_TRY(communicator_->rounds().Exchange(message, &messages, &piggyback));
  std::vector<Decision> decisions;
  if (Status s = negotiation_->Receive(messages, &decisions); !s.ok()) {
    communicator_->AbortAndNotifyPeers(s.code(), s.message(), s.rank());
    return s;
  }
  {
    std::lock_guard lock(state_.mutex);
    ++state_.stats.rounds;
    state_.stats.message_bytes += message.size();
    state_.stats.cached = hits_before_ + negotiation_->hits();
  }
  // A rank that sends data with a round submits only one operation in that round. So if
  // all ranks have sent data, and the only decision runs one new operation, the data
  // belong to that operation.
  const bool come = piggyback.whole && RunOneNew(decisions, first_id);
  const Piggyback* values = come ? &piggyback : nullptr;
  RJ_TRY(runner_.RunAll(decisions, values));
  stalls_.EndRound(negotiation_->pending() > 0);
  return OkStatus();
}

void ProgressEngine::FailAll(const Status& cause) {
  const std::vector<TaskPtr> tasks = tasks_.Fail(cause);
  record_.Report(tasks, {}, cause);
  const auto& recorder = communicator_->options().recorder;
  if (recorder && cause.rank() >= 0) recorder->Dump(cause.message());
  for (const TaskPtr& task : tasks)
    tasks_.Finish({task}, state_.WithContext(task->Describe(), cause), nullptr);
  tasks_.FinishJoin(state_.WithContext(kJoinTitle, cause), -1);
}

}  // namespace ringjax
