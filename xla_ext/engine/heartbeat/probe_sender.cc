// Sends kProbe messages and handles the replies. See probe_sender.h.
#include "engine/heartbeat/probe_sender.h"

#include <algorithm>
#include <cstring>
#include <string_view>

namespace ringjax {
namespace {

constexpr double kRecently = 0.5;  // seconds; see StragglerProbe::SendProbes

}  // namespace

void ProbeSender::SendProbes(const ProbeRequest& request) {
  const double now = SecondsNow();
  std::lock_guard lock(connections_->mutex());
  if (connections_->stopping()) return;
  for (PeerState& state : connections_->states()) {
    std::map<int, SentProbe>& sent_probes = sent_[state.index];
    if (!request.operation) sent_probes.erase(request.communicator);
    const auto& ranks = request.ranks;
    if (std::find(ranks.begin(), ranks.end(), state.peer.rank) == ranks.end()) continue;
    SentProbe& asked = sent_probes[request.communicator];
    if (asked.token > 0 && now - asked.when < kRecently) continue;
    asked = {};
    asked.token = ++token_;
    asked.when = now;
    ControlMessage::ProbeHead head;
    head.sequence = request.sequence;
    head.communicator = request.communicator;
    head.token = asked.token;
    head.operation = request.operation ? 1 : 0;
    connections_->Send(
        &state, ControlMessage::Type::kProbe,
        WithHead(head, Cut(request.what, ControlMessage::kMaxText - sizeof head)));
  }
}

std::vector<ProbeReply> ProbeSender::ProbeReplies(int communicator,
                                                  const std::vector<int>& ranks) const {
  std::vector<ProbeReply> replies;
  std::lock_guard lock(connections_->mutex());
  for (const int rank : ranks) {
    ProbeReply& reply = replies.emplace_back();
    reply.rank = rank;
    for (const PeerState& state : connections_->states()) {
      if (state.peer.rank != rank) continue;
      reply.host = state.peer.host;
      const auto found = sent_[state.index].find(communicator);
      if (found == sent_[state.index].end()) continue;
      reply.asked = true;
      reply.answered = found->second.answered;
      reply.entered = found->second.entered;
      reply.text = found->second.text;
    }
  }
  return replies;
}

void ProbeSender::HandleReply(PeerState* state, const std::string& text) {
  ControlMessage::ReplyHead head;
  std::memcpy(&head, text.data(), sizeof head);
  std::lock_guard lock(connections_->mutex());
  for (auto& [id, asked] : sent_[state->index]) {
    if (asked.token != head.token || asked.answered) continue;
    asked.answered = true;
    asked.entered = head.entered != 0;
    asked.text = Printable(std::string_view(text).substr(sizeof head), kMaxReplyBytes);
  }
}

}  // namespace ringjax
