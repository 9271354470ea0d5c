// Sends kProbe messages and handles the replies. See probe_sender.h.
#include "engine/heartbeat/probe_sender.h"

#include <cstring>
#include <string_view>

namespace ringjax {
namespace {

constexpr double kRecently = 0.5;  // seconds; see StragglerProbe::SendProbes

}  // namespace

void ProbeSender::SendProbes(const ProbeRequest& request) {
  std::lock_guard lock(connections_->mutex());
  if (connections_->stopping()) return;
  if (!request.operation) {
    sent_[request.communicator].clear();
    calls_[request.communicator] = request;
  }
  for (const int rank : request.ranks) Send(rank, request);
}

void ProbeSender::Send(int rank, const ProbeRequest& request) {
  const double now = SecondsNow();
  SentProbe& probe = sent_[request.communicator][rank];
  if (probe.token > 0 && now - probe.when < kRecently) return;
  probe = {};
  probe.token = ++token_;
  probe.when = now;
  ControlMessage::ProbeHead head;
  head.sequence = request.sequence;
  head.communicator = request.communicator;
  head.token = probe.token;
  head.operation = request.operation ? 1 : 0;
  connections_->Send(
      rank, ControlMessage::Type::kProbe,
      WithHead(head, Cut(request.what, ControlMessage::kMaxText - sizeof head)));
}

std::vector<ProbeReply> ProbeSender::ProbeReplies(int communicator,
                                                  const std::vector<int>& ranks) const {
  std::vector<ProbeReply> replies;
  std::lock_guard lock(connections_->mutex());
  const auto sent = sent_.find(communicator);
  for (const int rank : ranks) {
    ProbeReply& reply = replies.emplace_back();
    reply.rank = rank;
    reply.host = connections_->host(rank);
    if (sent == sent_.end() || !sent->second.contains(rank)) continue;
    const SentProbe& probe = sent->second.at(rank);
    reply.asked = true;
    reply.answered = probe.answered;
    reply.entered = probe.entered;
    reply.text = probe.text;
  }
  return replies;
}

void ProbeSender::HandleReply(int from, const std::string& text) {
  ControlMessage::ReplyHead head;
  std::memcpy(&head, text.data(), sizeof head);
  std::lock_guard lock(connections_->mutex());
  for (auto& [communicator, sent] : sent_) {
    const auto found = sent.find(from);
    if (found == sent.end()) continue;
    SentProbe& probe = found->second;
    if (probe.token != head.token || probe.answered) continue;
    probe.answered = true;
    probe.entered = head.entered != 0;
    probe.text = Printable(std::string_view(text).substr(sizeof head), kMaxReplyBytes);
    // A rank that waits in the call leads to the rank that it waits for. The chain ends
    // at a rank that has not made the call.
    const int next = probe.entered ? head.waits_for : -1;
    if (next >= 0 && next < connections_->size() && next != connections_->rank() &&
        !sent.contains(next) && !connections_->stopping())
      Send(next, calls_[communicator]);
    return;
  }
}

}  // namespace ringjax
