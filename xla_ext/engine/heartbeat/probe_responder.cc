// Handles kProbe messages and replies to them. See probe_responder.h.
#include "engine/heartbeat/probe_responder.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <string_view>
#include <utility>

namespace ringjax {
namespace {

constexpr double kPositionTimeout = 0.5;  // seconds that a probe waits for Answer
constexpr ptrdiff_t kMaxOpenProbes = 16;  // probes of one peer that wait for Answer
constexpr size_t kMaxStalls = 16;         // stalled calls kept in reported_stalls_

}  // namespace

void ProbeResponder::HandleProbe(int from, const std::string& text) {
  OpenProbe probe;
  std::memcpy(&probe.head, text.data(), sizeof probe.head);
  const auto here = Watched(probe.head.communicator);
  const bool entered =
      !probe.head.operation && here && here->entered() >= probe.head.sequence;
  if (entered || !inquire_) return Reply(from, probe.head, "");
  probe.what = Printable(std::string_view(text).substr(sizeof probe.head),
                         ControlMessage::kMaxText);
  probe.until = SecondsNow() + kPositionTimeout;
  probe.asker = from;
  {
    std::lock_guard lock(connections_->mutex());
    const auto same = [from](const OpenProbe& open) { return open.asker == from; };
    if (std::ranges::count_if(probes_, same) >= kMaxOpenProbes)
      probes_.erase(std::ranges::find_if(probes_, same));
    probe.number = ++last_probe_;
    probes_.push_back(std::move(probe));
  }
  inquire_->Ring();
}

std::shared_ptr<Communicator> ProbeResponder::Watched(int id) const {
  std::lock_guard lock(connections_->mutex());
  return watched_->Find(id);
}

// Returns the latest text of all communicators: a wait, or if none waits, the last
// call.
std::string ProbeResponder::LatestTrace() const {
  std::vector<std::shared_ptr<Communicator>> all;
  {
    std::lock_guard lock(connections_->mutex());
    all = watched_->All();
  }
  CallTrace best;
  for (const auto& c : all) {
    CallTrace answer = c->log().trace();
    if (!answer.has_text) continue;
    const bool better = !best.has_text || (answer.waits && !best.waits) ||
                        (answer.waits == best.waits && answer.when > best.when);
    if (better) best = std::move(answer);
  }
  return best.has_text ? best.text : "it has made no call in this epoch";
}

double ProbeResponder::NextReplyTime() const {
  std::lock_guard lock(connections_->mutex());
  return probes_.empty() ? std::numeric_limits<double>::infinity()
                         : probes_.front().until;
}

void ProbeResponder::SendDueReplies() {
  std::vector<std::pair<OpenProbe, std::string>> due;
  {
    std::lock_guard lock(connections_->mutex());
    if (probes_.empty()) return;
    const double now = SecondsNow();
    std::erase_if(probes_, [&](OpenProbe& probe) {
      const bool known = probe.number <= positioned_;
      if (!known && now < probe.until) return false;
      due.emplace_back(probe, known ? position_ : "its interpreter is busy");
      return true;
    });
  }
  for (const auto& [probe, position] : due) Reply(probe.asker, probe.head, position);
}

void ProbeResponder::Reply(int to, const ControlMessage::ProbeHead& asked,
                           const std::string& position) {
  const auto here = Watched(asked.communicator);
  ControlMessage::ReplyHead head;
  head.token = asked.token;
  if (!asked.operation && here && here->entered() >= asked.sequence) {
    head.entered = 1;
    head.waits_for = here->log().trace().waits_for;
  }
  std::string text = LatestTrace();
  if (!position.empty()) {
    text = Cut(text, kMaxReplyBytes / 2);
    text += "; " + position;
  }
  std::lock_guard lock(connections_->mutex());
  connections_->Send(to, ControlMessage::Type::kReply,
                     WithHead(head, Cut(text, kMaxReplyBytes)));
}

ProbeResponder::Asked ProbeResponder::asked() {
  Asked asked;
  std::lock_guard lock(connections_->mutex());
  for (const OpenProbe& probe : probes_) {
    if (probe.number <= positioned_) continue;
    asked.newest = std::max(asked.newest, probe.number);
    const std::pair stall(probe.head.communicator, probe.head.sequence);
    if (std::find(reported_stalls_.begin(), reported_stalls_.end(), stall) !=
        reported_stalls_.end())
      continue;
    if (reported_stalls_.size() >= kMaxStalls)
      reported_stalls_.erase(reported_stalls_.begin());
    reported_stalls_.push_back(stall);
    asked.stalls.push_back("rank " + std::to_string(probe.asker) +
                           " waits for this rank to call " + probe.what);
  }
  return asked;
}

void ProbeResponder::Answer(uint64_t newest, const std::string& position) {
  {
    std::lock_guard lock(connections_->mutex());
    positioned_ = std::max(positioned_, newest);
    position_ = Printable(position, kMaxReplyBytes / 2);
  }
  wakeup_->Ring();
}

}  // namespace ringjax
