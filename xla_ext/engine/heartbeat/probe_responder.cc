// See probe_responder.h.
#include "engine/heartbeat/probe_responder.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <string_view>
#include <utility>

namespace ringjax {
namespace {

constexpr double kForInterpreter = 0.5;  // seconds that a probe waits for Answer
constexpr ptrdiff_t kMostOpen = 16;      // probes of one peer that wait for Answer
// The number of stalled calls that are stored, so that asked() reports each only once.
constexpr size_t kMostStalls = 16;

}  // namespace

void ProbeResponder::OnAsk(PeerState* state, const std::string& text) {
  Open question;
  std::memcpy(&question.head, text.data(), sizeof question.head);
  const auto here = Watched(question.head.communicator);
  const bool entered =
      !question.head.operation && here && here->entered() >= question.head.sequence;
  if (entered || !inquire_) return Reply(state, question.head, "");
  question.what = Printable(std::string_view(text).substr(sizeof question.head),
                            ControlMessage::kMostText);
  question.until = SecondsNow() + kForInterpreter;
  question.asker = state;
  {
    std::lock_guard lock(connections_->mutex());
    const auto same = [state](const Open& open) { return open.asker == state; };
    if (std::ranges::count_if(questions_, same) >= kMostOpen)
      questions_.erase(std::ranges::find_if(questions_, same));
    question.number = ++question_;
    questions_.push_back(std::move(question));
  }
  inquire_->Ring();
}

std::shared_ptr<Communicator> ProbeResponder::Watched(int id) const {
  std::lock_guard lock(connections_->mutex());
  return watched_->Find(id);
}

// Returns a text: what this rank waits for on any communicator, or else its last call.
std::string ProbeResponder::OwnTrace() const {
  std::vector<std::shared_ptr<Communicator>> all;
  {
    std::lock_guard lock(connections_->mutex());
    all = watched_->All();
  }
  ProbeAnswer best;
  for (const auto& c : all) {
    ProbeAnswer answer = c->log().probe_answer();
    if (!answer.has_text) continue;
    const bool better = !best.has_text || (answer.waits && !best.waits) ||
                        (answer.waits == best.waits && answer.when > best.when);
    if (better) best = std::move(answer);
  }
  return best.has_text ? best.text : "it has made no call in this epoch";
}

double ProbeResponder::NextAnswer() const {
  std::lock_guard lock(connections_->mutex());
  return questions_.empty() ? std::numeric_limits<double>::infinity()
                            : questions_.front().until;
}

void ProbeResponder::AnswerWhatIsDue() {
  std::vector<std::pair<Open, std::string>> due;
  {
    std::lock_guard lock(connections_->mutex());
    if (questions_.empty()) return;
    const double now = SecondsNow();
    std::erase_if(questions_, [&](Open& question) {
      const bool known = question.number <= placed_;
      if (!known && now < question.until) return false;
      due.emplace_back(question, known ? place_ : "its interpreter is busy");
      return true;
    });
  }
  for (const auto& [question, place] : due) Reply(question.asker, question.head, place);
}

void ProbeResponder::Reply(PeerState* state, const ControlMessage::AskHead& asked,
                           const std::string& place) {
  const auto here = Watched(asked.communicator);
  ControlMessage::AnswerHead head;
  head.token = asked.token;
  head.entered = !asked.operation && here && here->entered() >= asked.sequence ? 1 : 0;
  std::string text = OwnTrace();
  if (!place.empty()) {
    text = Cut(text, kMostReply / 2);
    text += "; " + place;
  }
  std::lock_guard lock(connections_->mutex());
  connections_->Send(state, ControlMessage::Type::kAnswer,
                     WithHead(head, Cut(text, kMostReply)));
}

ProbeResponder::Asked ProbeResponder::asked() {
  Asked asked;
  std::lock_guard lock(connections_->mutex());
  for (const Open& question : questions_) {
    if (question.number <= placed_) continue;
    asked.newest = std::max(asked.newest, question.number);
    const std::pair stall(question.head.communicator, question.head.sequence);
    if (std::find(told_.begin(), told_.end(), stall) != told_.end()) continue;
    if (told_.size() >= kMostStalls) told_.erase(told_.begin());
    told_.push_back(stall);
    asked.stalls.push_back("rank " + std::to_string(question.asker->peer.rank) +
                           " waits for this rank to call " + question.what);
  }
  return asked;
}

void ProbeResponder::Answer(uint64_t newest, const std::string& place) {
  {
    std::lock_guard lock(connections_->mutex());
    placed_ = std::max(placed_, newest);
    place_ = Printable(place, kMostReply / 2);
  }
  wakeup_->Ring();
}

}  // namespace ringjax
