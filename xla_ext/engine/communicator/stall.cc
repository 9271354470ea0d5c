// A call that waits for long: finds and probes the late ranks, and prints warnings. See
// communicator.h; the error at the timeout is in blame.cc.
#include <algorithm>
#include <cstdio>
#include <utility>

#include "engine/communicator/communicator.h"

namespace ringjax {

// Probes late ranks and warns of a call without progress for `seconds`. A warning, or
// the end of the call, first waits a moment for replies. See Endpoints::on_stall.
Status Communicator::OnStall(const Call& call, double seconds,
                             const std::vector<int>& peers, bool* end) {
  RJ_TRY(CheckShutdowns(entered()));
  if (!waiting_recorded_) RecordWaiting(call, peers);
  const double warning = options_.stall_warning;
  if (stall_monitor_.MustAsk(seconds, warning, endpoints_.timeout))
    AskWhereTheyAre(call, peers);
  const bool warns = stall_monitor_.MustWarn(seconds, warning);
  if (!warns && !*end) return OkStatus();
  if (!stall_monitor_.Settled(seconds, AllAnswered(ProbeReplies(Others())))) {
    *end = false;  // so that the error contains the replies
    return OkStatus();
  }
  if (!warns) return OkStatus();
  stall_monitor_.Warned(seconds);
  std::vector<int> late = Late();
  if (late.empty())
    for (int peer : peers) late.push_back(options_.world_ranks[peer]);
  const std::vector<ProbeReply> replies = ProbeReplies(late);
  std::string text;
  for (size_t i = 0; i < replies.size(); ++i) {
    const std::string reply_text = i < kMostTold ? ReplyText(replies[i]) : "";
    text += (i > 0 ? ", " : "") + Title(replies[i]) +
            (reply_text.empty() ? "" : " (" + reply_text + ")");
  }
  std::fprintf(stderr,
               "[ringjax %d/%d e%u] %s has waited %.0f s for %s; still waiting\n",
               options_.world_ranks[rank()], size(), options_.epoch,
               Where(call).c_str(), seconds, text.empty() ? "its peers" : text.c_str());
  return OkStatus();
}

// Records what the call waits for, as the reply of this rank to a straggler probe.
void Communicator::RecordWaiting(const Call& call, const std::vector<int>& peers) {
  waiting_recorded_ = true;
  std::string text = "it waits in " + Where(call);
  if (!peers.empty())
    text += " for rank " + std::to_string(options_.world_ranks[peers[0]]);
  std::lock_guard lock(mutex_);
  waiting_ = std::move(text);
}

void Communicator::StoppedWaiting() {
  std::lock_guard lock(mutex_);
  waiting_.clear();
}

void Communicator::AskWhereTheyAre(const Call& call, const std::vector<int>& peers) {
  const HeartbeatHooks hooks = this->hooks();
  const auto straggler_probe = hooks.straggler_probe.lock();
  if (!straggler_probe) return;
  // At most kMostAsked: first known late ranks, then those that the call waits for.
  std::vector<int> waited;
  for (int peer : peers) waited.push_back(options_.world_ranks[peer]);
  std::vector<int> asked;
  if (hooks.late_ranks) asked = hooks.late_ranks(entered());
  for (const auto& more : {waited, Others()})
    for (int other : more)
      if (std::find(asked.begin(), asked.end(), other) == asked.end())
        asked.push_back(other);
  if (asked.size() > kMostAsked) asked.resize(kMostAsked);
  straggler_probe->Ask({id(), entered(), false, asked, Where(call)});
}

void Communicator::ProbeStragglers(uint64_t operation, const std::vector<int>& ranks,
                                   const std::string& what) {
  const auto straggler_probe = hooks().straggler_probe.lock();
  if (!straggler_probe) return;
  std::vector<int> asked = ranks;
  if (asked.size() > kMostAsked) asked.resize(kMostAsked);
  straggler_probe->Ask({id(), operation, true, asked, what});
}

std::vector<ProbeReply> Communicator::ProbeReplies(
    const std::vector<int>& ranks) const {
  if (const auto straggler_probe = hooks().straggler_probe.lock())
    return straggler_probe->ProbeReplies(id(), ranks);
  std::vector<ProbeReply> nothing;
  for (int r : ranks) nothing.emplace_back().rank = r;
  return nothing;
}

std::vector<int> Communicator::Others() const {
  std::vector<int> others = options_.world_ranks;
  std::erase(others, options_.world_ranks[rank()]);
  return others;
}

// Returns the world ranks that have not made the call. Heartbeats count the calls on
// the world's communicators; a reply to a probe is newer and overrides the count. Other
// communicators have only replies: without a late one, silent ranks count as late.
std::vector<int> Communicator::Late() const {
  std::vector<int> late, silent;
  const auto late_ranks = hooks().late_ranks;
  if (late_ranks) late = late_ranks(entered());
  for (const ProbeReply& r : ProbeReplies(Others())) {
    if (!r.asked) continue;
    if (r.answered && r.entered) {
      std::erase(late, r.rank);
    } else if (r.answered) {
      if (std::find(late.begin(), late.end(), r.rank) == late.end())
        late.push_back(r.rank);
    } else {
      silent.push_back(r.rank);
    }
  }
  if (late.empty() && !late_ranks) late = silent;
  std::sort(late.begin(), late.end());
  return late;
}

void Communicator::SetHooks(HeartbeatHooks hooks) {
  std::lock_guard lock(mutex_);
  hooks_ = std::move(hooks);
}

HeartbeatHooks Communicator::hooks() const {
  std::lock_guard lock(mutex_);
  return hooks_;
}

void Communicator::set_missing_locally(std::function<std::string()> f) {
  std::lock_guard lock(mutex_);
  missing_ = std::move(f);
}

ProbeAnswer Communicator::probe_answer() const {
  std::unique_lock lock(mutex_);
  const auto missing = missing_;
  lock.unlock();  // `missing` takes DeviceRendezvous::mutex_, which comes before mutex_
  const std::string what = missing && !aborted() ? missing() : "";
  lock.lock();
  ProbeAnswer answer;
  answer.when = last_.end;
  if (!waiting_.empty() && !aborted()) {
    answer.has_text = answer.waits = true;
    answer.text = waiting_;
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
  if (answer.has_text && id() != 0) answer.text += " of " + options_.name;
  return answer;
}

}  // namespace ringjax
