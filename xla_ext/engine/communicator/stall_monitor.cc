// Implements StallMonitor (stall_monitor.h). FailureReport composes the error at the
// timeout.
#include "engine/communicator/stall_monitor.h"

#include <cstdio>
#include <utility>

namespace ringjax {

void StallMonitor::BeginCall() {
  policy_ = {};
  waiting_recorded_ = false;
}

void StallMonitor::EndRound() {
  if (waiting_recorded_) log_.ClearWaiting();
}

Status StallMonitor::OnStall(const Call& call, double seconds,
                             const std::vector<int>& peers, bool* end) {
  RJ_TRY(state_.abort.CheckShutdowns(state_.sequence()));
  if (!waiting_recorded_) RecordWaiting(call, peers);
  const double warning = state_.options.stall_warning;
  if (policy_.MustProbe(seconds, warning, state_.endpoints.timeout))
    heartbeat_.ProbeCall(peers, failures_.DescribeCall(call));
  const bool warns = policy_.MustWarn(seconds, warning);
  if (!warns && !*end) return OkStatus();
  if (!policy_.DoneWaiting(seconds,
                           AllAnswered(heartbeat_.ProbeReplies(heartbeat_.Others())))) {
    *end = false;  // wait for replies, so that the error contains them
    return OkStatus();
  }
  if (!warns) return OkStatus();
  policy_.Warned(seconds);
  std::vector<int> late = heartbeat_.Late();
  if (late.empty())
    for (int peer : peers) late.push_back(state_.options.world_ranks[peer]);
  const std::vector<ProbeReply> replies = heartbeat_.ProbeReplies(late);
  std::string text;
  for (size_t i = 0; i < replies.size(); ++i) {
    const std::string reply_text = i < kMaxReplies ? ReplyText(replies[i]) : "";
    text += (i > 0 ? ", " : "") + Title(replies[i]) +
            (reply_text.empty() ? "" : " (" + reply_text + ")");
  }
  std::fprintf(stderr,
               "[ringjax %d/%d e%u] %s has waited %.0f s for %s; still waiting\n",
               state_.world_rank(), state_.size(), state_.options.epoch,
               failures_.DescribeCall(call).c_str(), seconds,
               text.empty() ? "its peers" : text.c_str());
  return OkStatus();
}

// Records what the call waits for, as the reply of this rank to a straggler probe.
void StallMonitor::RecordWaiting(const Call& call, const std::vector<int>& peers) {
  waiting_recorded_ = true;
  std::string text = "it waits in " + failures_.DescribeCall(call);
  const int rank = peers.empty() ? -1 : state_.options.world_ranks[peers[0]];
  if (rank >= 0) text += " for rank " + std::to_string(rank);
  log_.SetWaiting(std::move(text), rank);
}

}  // namespace ringjax
