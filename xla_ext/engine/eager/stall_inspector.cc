// Implements StallInspector: probes stragglers, prints warnings and expires operations.
// See stall_inspector.h.
#include "engine/eager/stall_inspector.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <utility>

#include "engine/eager/disagreement.h"

namespace ringjax {

StallInspector::StallInspector(LaneState& state)
    : options_(state.options), communicator_(state.communicator) {}

void StallInspector::Watch(Negotiation* negotiation) {
  const auto now = Clock::now();
  const std::vector<Negotiation::Waiting> all = negotiation->waiting();
  // Watch visits every pending operation, so it runs seldom. The pause is an eighth of
  // the shortest timeout or warning time, but at least kShortest and at most kLongest
  // seconds, or kReplyPause seconds while replies to a straggler probe are awaited.
  // Watch does not run while no operation is pending.
  constexpr double kLongest = 1, kShortest = 0.01, kReplyPause = 0.05;
  double pause = kLongest;
  const auto before = [&](double limit) {
    if (limit > 0) pause = std::min(pause, std::max(limit / 8, kShortest));
  };
  before(options_.stall_warning);
  before(options_.timeout);
  std::unordered_map<uint64_t, Watched> watched;
  std::vector<Late> late;
  for (const Negotiation::Waiting& waiting : all) {
    const auto known = watched_.find(waiting.id);
    Watched& w = watched[waiting.id];
    w = known != watched_.end() ? known->second : Watched{now};
    const double seconds = std::chrono::duration<double>(now - w.since).count();
    before(LimitOf(waiting));
    if (!CheckOperation(waiting, seconds, negotiation, &w, &late))
      pause = std::min(pause, kReplyPause);
  }
  watched_.swap(watched);
  Warn(late);
  next_look_ = all.empty() ? Clock::time_point::max() : now + ToDuration(pause);
}

// Returns the timeout of this rank's submission in seconds, or 0 if it has no timeout
// or this rank has not submitted the operation.
double StallInspector::LimitOf(const Negotiation::Waiting& waiting) const {
  if (!waiting.own) return 0;
  const double own = static_cast<const Task&>(*waiting.own).timeout;
  return own >= 0 ? own : options_.timeout;
}

// Warns about an operation whose warning time has passed, and expires one whose timeout
// has passed. Returns false to postpone this while replies to the straggler probe are
// awaited.
bool StallInspector::CheckOperation(const Negotiation::Waiting& waiting, double seconds,
                                    Negotiation* negotiation, Watched* w,
                                    std::vector<Late>* late) {
  const double warning = options_.stall_warning;
  const double limit = w->expired ? 0 : LimitOf(waiting);
  const bool reports = waiting.own || communicator_->rank() == 0;
  if (reports && w->stall_policy.MustProbe(seconds, warning, limit))
    communicator_->heartbeat().ProbeOperation(waiting.id, WorldRanks(waiting.missing),
                                              waiting.any->Describe());
  const bool warns = w->stall_policy.MustWarn(seconds, warning);
  const bool ends = limit > 0 && seconds >= limit;
  if (!warns && !ends) return true;
  const std::vector<int> missing = WorldRanks(waiting.missing);
  if (!w->stall_policy.DoneWaiting(
          seconds, AllAnswered(communicator_->heartbeat().ProbeReplies(missing))))
    return false;
  if (warns) {
    w->stall_policy.Warned(seconds);
    if (reports) late->push_back({&waiting, seconds});
  }
  if (ends) {
    w->expired = true;
    negotiation->Expire(waiting.any->op, waiting.any->name, limit, ReplyTexts(missing));
  }
  return true;
}

std::vector<int> StallInspector::WorldRanks(const std::vector<int>& ranks) const {
  const std::vector<int>& members = communicator_->options().world_ranks;
  std::vector<int> world;
  for (int r : ranks) world.push_back(members[static_cast<size_t>(r)]);
  return world;
}

// Returns the replies of `ranks` to the straggler probe as text: "rank 3 on node-b: its
// last call was ...; it is at train.py:41 in load_batch".
std::string StallInspector::ReplyTexts(const std::vector<int>& ranks) const {
  std::string text;
  size_t told = 0;
  for (const ProbeReply& reply : communicator_->heartbeat().ProbeReplies(ranks)) {
    const std::string reply_text = ReplyText(reply);
    if (reply_text.empty()) continue;
    text += (told > 0 ? "; " : "") + Title(reply) + ": " + reply_text;
    if (++told == kMaxReplies) break;
  }
  return text;
}

// Prints one warning about all late operations, but names only a few of them, because a
// late rank has usually not submitted any tensor of a model.
void StallInspector::Warn(const std::vector<Late>& late) const {
  constexpr size_t kMaxNamed = 5;
  const CommunicatorOptions& o = communicator_->options();
  std::string text;
  std::vector<int> missing;
  for (size_t i = 0; i < std::min(late.size(), kMaxNamed); ++i) {
    const double seconds = late[i].seconds;
    const double shown =
        seconds < 10 ? std::round(seconds * 10) / 10 : std::round(seconds);
    text += (i > 0 ? "; " : "") + MissingText(*late[i].waiting, o.world_ranks, shown);
    for (int r : WorldRanks(late[i].waiting->missing))
      if (std::find(missing.begin(), missing.end(), r) == missing.end())
        missing.push_back(r);
  }
  if (late.empty()) return;
  if (late.size() > kMaxNamed)
    text += "; and " + std::to_string(late.size() - kMaxNamed) + " more operations";
  if (const std::string reply_texts = ReplyTexts(missing); !reply_texts.empty())
    text += "; " + reply_texts;
  std::fprintf(stderr, "[ringjax rank %d] %s%s; still waiting\n",
               o.world_ranks[communicator_->rank()], communicator_->Prefix().c_str(),
               text.c_str());
}

}  // namespace ringjax
