// Implements CallLog: updates the statistics and the last call, and records events. See
// call_log.h.
#include "engine/communicator/call_log.h"

#include <chrono>
#include <utility>

namespace ringjax {

void CallLog::OnDevice(const Call& call) {
  event_.device = true;
  for (const Tensor& t : call.tensors) event_.bytes += t.bytes();
}

void CallLog::Count(const Request& request, std::string_view algorithm,
                    std::string_view route, uint64_t sent_bytes) {
  event_.bytes += request.bytes;
  event_.algorithm = route;
  std::lock_guard lock(mutex_);
  OpStats& stats = stats_[static_cast<size_t>(request.op)];
  stats.bytes += request.bytes;
  stats.sent_bytes += sent_bytes;
  ++stats.algorithms[algorithm];
}

void CallLog::CountFault(const Call& call) {
  const CommunicatorOptions& options = state_.options;
  if (options.recorder)
    options.recorder->AddFault({options.process_set, Lane::kCompiled, Name(call.op)});
}

void CallLog::Succeeded(const Call& call) {
  const auto end = Clock::now();
  Record(call, end, Code::kOk);
  std::lock_guard lock(mutex_);
  OpStats& stats = stats_[static_cast<size_t>(call.op)];
  ++stats.calls;
  stats.seconds += std::chrono::duration<double>(end - event_.entered).count();
  SetLast(call, end);
}

void CallLog::Exchanged(const Call& call, uint64_t bytes) {
  event_.bytes = bytes;
  event_.algorithm = "messages";
  Record(call, Clock::now(), Code::kOk);
}

void CallLog::EndedAtAgreement(const Call& call, Code outcome) {
  Record(call, event_.agreed, outcome);
  const auto end = Clock::now();
  std::lock_guard lock(mutex_);
  SetLast(call, end);
}

void CallLog::Record(const Call& call, Clock::time_point end, Code outcome) {
  const CommunicatorOptions& options = state_.options;
  event_.done = end;
  // An eager lane records its own operations (LaneRecord::Report).
  if (!options.recorder || options.eager || trial_) return;
  if (options.device_index > 0 && outcome == Code::kOk)
    return options.recorder->AddBytes(
        {options.process_set, Lane::kCompiled, Name(call.op)}, event_.bytes);
  const bool jax = !call.jax_op.empty();
  event_.lane = jax ? Lane::kJax : Lane::kCompiled;
  event_.op = jax ? call.jax_op : Name(call.op);
  event_.overlapped = call.overlapped;
  event_.outcome = outcome;
  event_.set = options.process_set;
  event_.epoch = options.epoch;
  event_.sequence = state_.sequence();
  event_.SetName(jax ? std::string_view(options.name) : call.name);
  options.recorder->Add(event_);
}

void CallLog::SetLast(const Call& call, Clock::time_point end) {
  constexpr size_t kMaxName = 128;
  last_.op = call.op;
  last_.name.assign(call.name.substr(0, kMaxName));  // assign keeps the capacity
  last_.sequence = state_.sequence();
  last_.end = end;
  if (!waiting_.empty()) waiting_.clear();
}

void CallLog::SetWaiting(std::string text, int rank) {
  std::lock_guard lock(mutex_);
  waiting_ = std::move(text);
  waits_for_ = rank;
}

void CallLog::ClearWaiting() {
  std::lock_guard lock(mutex_);
  waiting_.clear();
}

void CallLog::set_missing_locally(std::function<std::string()> f) {
  std::lock_guard lock(mutex_);
  missing_ = std::move(f);
}

CallTrace CallLog::trace() const {
  std::unique_lock lock(mutex_);
  const auto missing = missing_;
  // `missing` locks DeviceRendezvous::mutex_, which may only be locked before mutex_.
  lock.unlock();
  const std::string what = missing && !state_.abort.aborted() ? missing() : "";
  lock.lock();
  CallTrace answer;
  answer.when = last_.end;
  if (!waiting_.empty() && !state_.abort.aborted()) {
    answer.has_text = answer.waits = true;
    answer.text = waiting_;
    answer.waits_for = waits_for_;
  } else if (!what.empty()) {
    answer.has_text = answer.waits = true;
    answer.when = Clock::now();
    answer.text = "it waits for " + what;
  } else if (last_.sequence > 0) {
    answer.has_text = true;
    answer.text = "its last call was " +
                  std::string(kCollectiveNames[static_cast<size_t>(last_.op)]);
    if (!last_.name.empty()) answer.text += " '" + last_.name + "'";
    answer.text += " (seq " + std::to_string(last_.sequence) + ")";
  }
  if (answer.has_text && state_.id() != 0) answer.text += " of " + state_.options.name;
  return answer;
}

std::map<std::string, OpStats> CallLog::stats() const {
  std::lock_guard lock(mutex_);
  std::map<std::string, OpStats> all;
  for (size_t op = 0; op < stats_.size(); ++op)
    if (stats_[op].calls > 0) all[std::string(kCollectiveNames[op])] = stats_[op];
  return all;
}

void CallLog::Restart(bool trial) {
  trial_ = trial;
  std::lock_guard lock(mutex_);
  stats_ = {};
}

}  // namespace ringjax
