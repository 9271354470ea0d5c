// Straggler probes, warnings and expiry. See stall_inspector.h.
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
  // Watch costs time for each pending operation, so it runs seldom: after an eighth of
  // the shortest limit, but between kShortest and kLongest, or after kForAnswers while
  // replies are awaited. It does not run while nothing is pending.
  constexpr double kLongest = 1, kShortest = 0.01, kForAnswers = 0.05;
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
    if (!LookAt(waiting, seconds, negotiation, &w, &late))
      pause = std::min(pause, kForAnswers);
  }
  watched_.swap(watched);
  Warn(late);
  next_look_ = all.empty() ? Clock::time_point::max()
                           : now + std::chrono::duration_cast<Clock::duration>(
                                       std::chrono::duration<double>(pause));
}

// The timeout of this rank's own submission in seconds; 0 if there is none.
double StallInspector::LimitOf(const Negotiation::Waiting& waiting) const {
  if (!waiting.own) return 0;
  const double own = static_cast<const Task&>(*waiting.own).timeout;
  return own >= 0 ? own : options_.timeout;
}

// Warns about one operation, or expires it, if it is time. Returns false if it is time
// but replies to the straggler probe are still awaited.
bool StallInspector::LookAt(const Negotiation::Waiting& waiting, double seconds,
                            Negotiation* negotiation, Watched* w,
                            std::vector<Late>* late) {
  const double warning = options_.stall_warning;
  const double limit = w->expired ? 0 : LimitOf(waiting);
  const bool speaks = waiting.own || communicator_->rank() == 0;
  if (speaks && w->stall_policy.MustAsk(seconds, warning, limit))
    communicator_->heartbeat().ProbeOperation(waiting.id, World(waiting.missing),
                                              waiting.any->Describe());
  const bool warns = w->stall_policy.MustWarn(seconds, warning);
  const bool ends = limit > 0 && seconds >= limit;
  if (!warns && !ends) return true;
  const std::vector<int> missing = World(waiting.missing);
  if (!w->stall_policy.Settled(
          seconds, AllAnswered(communicator_->heartbeat().ProbeReplies(missing))))
    return false;
  if (warns) {
    w->stall_policy.Warned(seconds);
    if (speaks) late->push_back({&waiting, seconds});
  }
  if (ends) {
    w->expired = true;
    negotiation->Expire(waiting.any->op, waiting.any->name, limit, ReplyTexts(missing));
  }
  return true;
}

std::vector<int> StallInspector::World(const std::vector<int>& ranks) const {
  const std::vector<int>& members = communicator_->options().world_ranks;
  std::vector<int> world;
  for (int r : ranks) world.push_back(members[static_cast<size_t>(r)]);
  return world;
}

// The replies to the straggler probe as text: "rank 3 on node-b: its last call was ...;
// it is at train.py:41 in load_batch".
std::string StallInspector::ReplyTexts(const std::vector<int>& ranks) const {
  std::string text;
  size_t told = 0;
  for (const ProbeReply& reply : communicator_->heartbeat().ProbeReplies(ranks)) {
    const std::string reply_text = ReplyText(reply);
    if (reply_text.empty()) continue;
    text += (told > 0 ? "; " : "") + Title(reply) + ": " + reply_text;
    if (++told == kMostTold) break;
  }
  return text;
}

// Prints one warning about all late operations. It names only a few, because a late
// rank usually lacks all tensors of a model.
void StallInspector::Warn(const std::vector<Late>& late) const {
  constexpr size_t kMostNamed = 5;
  const CommunicatorOptions& o = communicator_->options();
  std::string text;
  std::vector<int> missing;
  for (size_t i = 0; i < std::min(late.size(), kMostNamed); ++i) {
    const double seconds = late[i].seconds;
    const double shown =
        seconds < 10 ? std::round(seconds * 10) / 10 : std::round(seconds);
    text += (i > 0 ? "; " : "") + MissingText(*late[i].waiting, o.world_ranks, shown);
    for (int r : World(late[i].waiting->missing))
      if (std::find(missing.begin(), missing.end(), r) == missing.end())
        missing.push_back(r);
  }
  if (late.empty()) return;
  if (late.size() > kMostNamed)
    text += "; and " + std::to_string(late.size() - kMostNamed) + " more operations";
  if (const std::string reply_texts = ReplyTexts(missing); !reply_texts.empty())
    text += "; " + reply_texts;
  std::fprintf(stderr, "[ringjax rank %d] %s%s; still waiting\n",
               o.world_ranks[communicator_->rank()], communicator_->Prefix().c_str(),
               text.c_str());
}

}  // namespace ringjax
