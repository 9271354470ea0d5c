// Straggler probes over the sockets of the heartbeat. See heartbeat.h.
//
// A rank replies at once if it has made the call in question, or has no `inquire`.
// Otherwise it rings `inquire` and waits for Answer, for kForInterpreter at most. After
// that time it replies that the interpreter is busy: a thread holds the interpreter's
// lock, or no thread of the interpreter runs.
#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "engine/heartbeat/heartbeat.h"

namespace ringjax {
namespace {

constexpr double kForInterpreter = 0.5;  // seconds
constexpr double kRecently = 0.5;        // seconds; see StragglerProbe::Ask
constexpr ptrdiff_t kMostOpen = 16;      // probes of one peer that wait for Answer
constexpr size_t kMostStalls = 16;       // stalls kept to return each only once

template <typename Head>
std::string WithHead(const Head& head, std::string_view text) {
  std::string bytes(reinterpret_cast<const char*>(&head), sizeof head);
  return bytes.append(text);
}

}  // namespace

// -- probes that this rank sends -----------------------------------------------------

void Heartbeat::Ask(const Question& question) {
  const double now = Now();
  std::lock_guard lock(mutex_);
  if (stopping_) return;
  for (State& state : states_) {
    if (!question.operation) state.inquired.erase(question.communicator);
    const auto& ranks = question.ranks;
    if (std::find(ranks.begin(), ranks.end(), state.peer.rank) == ranks.end()) continue;
    Inquired& asked = state.inquired[question.communicator];
    if (asked.token > 0 && now - asked.when < kRecently) continue;
    asked = {};
    asked.token = ++token_;
    asked.when = now;
    AskHead head;
    head.sequence = question.sequence;
    head.communicator = question.communicator;
    head.token = asked.token;
    head.operation = question.operation ? 1 : 0;
    Send(&state, Type::kAsk,
         WithHead(head, Cut(question.what, kMostText - sizeof head)));
  }
}

std::vector<ProbeReply> Heartbeat::ProbeReplies(int communicator,
                                                const std::vector<int>& ranks) const {
  std::vector<ProbeReply> replies;
  std::lock_guard lock(mutex_);
  for (const int rank : ranks) {
    ProbeReply& reply = replies.emplace_back();
    reply.rank = rank;
    for (const State& state : states_) {
      if (state.peer.rank != rank) continue;
      reply.host = state.peer.host;
      const auto found = state.inquired.find(communicator);
      if (found == state.inquired.end()) continue;
      reply.asked = true;
      reply.answered = found->second.answered;
      reply.entered = found->second.entered;
      reply.text = found->second.text;
    }
  }
  return replies;
}

void Heartbeat::OnAnswer(State* state, const std::string& text) {
  AnswerHead head;
  std::memcpy(&head, text.data(), sizeof head);
  std::lock_guard lock(mutex_);
  for (auto& [id, asked] : state->inquired) {
    if (asked.token != head.token || asked.answered) continue;
    asked.answered = true;
    asked.entered = head.entered != 0;
    asked.text = Printable(std::string_view(text).substr(sizeof head), kMostReply);
  }
}

// -- replies of this rank ------------------------------------------------------------

void Heartbeat::OnAsk(State* state, const std::string& text) {
  Open question;
  std::memcpy(&question.head, text.data(), sizeof question.head);
  const auto here = Watched(question.head.communicator);
  const bool entered =
      !question.head.operation && here && here->entered() >= question.head.sequence;
  if (entered || !inquire_) return Reply(state, question.head, "");
  question.what =
      Printable(std::string_view(text).substr(sizeof question.head), kMostText);
  question.until = Now() + kForInterpreter;
  question.asker = state;
  {
    std::lock_guard lock(mutex_);
    const auto same = [state](const Open& open) { return open.asker == state; };
    if (std::ranges::count_if(questions_, same) >= kMostOpen)
      questions_.erase(std::ranges::find_if(questions_, same));
    question.number = ++question_;
    questions_.push_back(std::move(question));
  }
  inquire_->Ring();
}

std::shared_ptr<Communicator> Heartbeat::Watched(int id) const {
  std::lock_guard lock(mutex_);
  for (const auto& weak : watched_)
    if (auto c = weak.lock(); c && c->id() == id) return c;
  return nullptr;
}

// Returns what this rank waits for, or else its last call, of all communicators.
std::string Heartbeat::OwnTrace() const {
  std::vector<std::shared_ptr<Communicator>> all;
  {
    std::lock_guard lock(mutex_);
    for (const auto& weak : watched_)
      if (auto c = weak.lock()) all.push_back(std::move(c));
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

double Heartbeat::NextAnswer() const {
  std::lock_guard lock(mutex_);
  return questions_.empty() ? std::numeric_limits<double>::infinity()
                            : questions_.front().until;
}

void Heartbeat::AnswerWhatIsDue() {
  std::vector<std::pair<Open, std::string>> due;
  {
    std::lock_guard lock(mutex_);
    if (questions_.empty()) return;
    const double now = Now();
    std::erase_if(questions_, [&](Open& question) {
      const bool known = question.number <= placed_;
      if (!known && now < question.until) return false;
      due.emplace_back(question, known ? place_ : "its interpreter is busy");
      return true;
    });
  }
  for (const auto& [question, place] : due) Reply(question.asker, question.head, place);
}

void Heartbeat::Reply(State* state, const AskHead& asked, const std::string& place) {
  const auto here = Watched(asked.communicator);
  AnswerHead head;
  head.token = asked.token;
  head.entered = !asked.operation && here && here->entered() >= asked.sequence ? 1 : 0;
  std::string text = OwnTrace();
  if (!place.empty()) {
    text = Cut(text, kMostReply / 2);
    text += "; " + place;
  }
  std::lock_guard lock(mutex_);
  Send(state, Type::kAnswer, WithHead(head, Cut(text, kMostReply)));
}

// -- for the thread that finds the position of the program ---------------------------

Heartbeat::Asked Heartbeat::asked() {
  Asked asked;
  std::lock_guard lock(mutex_);
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

void Heartbeat::Answer(uint64_t newest, const std::string& place) {
  {
    std::lock_guard lock(mutex_);
    placed_ = std::max(placed_, newest);
    place_ = Printable(place, kMostReply / 2);
  }
  wakeup_->Ring();
}

}  // namespace ringjax
