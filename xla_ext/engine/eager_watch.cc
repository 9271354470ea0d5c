// Who is late: warnings about what some ranks have submitted and others have not, and
// the end of waiting for it. By this rank's clock; what is decided because of it, all
// ranks decide (Negotiation::Expire).
#include <algorithm>
#include <cmath>
#include <cstdio>

#include "engine/disagreement.h"
#include "engine/eager.h"

namespace ringjax {

void EagerLane::Watch() {
  const auto now = Clock::now();
  const std::vector<Negotiation::Waiting> all = negotiation_->waiting();
  const auto rank = communicator_->rank();
  std::unordered_map<uint64_t, Watched> watched;
  std::vector<Late> late;
  for (const Negotiation::Waiting& waiting : all) {
    const auto known = watched_.find(waiting.id);
    Watched& w = watched[waiting.id];
    w = known != watched_.end() ? known->second : Watched{now};
    const double seconds = std::chrono::duration<double>(now - w.since).count();
    const bool mine = std::find(waiting.submitted.begin(), waiting.submitted.end(),
                                rank) != waiting.submitted.end();
    const double warning = options_.stall_warning;
    if (warning > 0 && seconds >= std::max(warning, 2 * w.warned)) {
      w.warned = seconds;
      if (mine || rank == 0) late.push_back({&waiting, seconds});
    }
    if (mine && !w.expired && options_.timeout > 0 && seconds >= options_.timeout) {
      w.expired = true;
      negotiation_->Expire(waiting.any->op, waiting.any->name, options_.timeout);
    }
  }
  watched_.swap(watched);
  Warn(late);
  // Each look costs as much as is pending, so looks are far apart; none if nothing is.
  constexpr double kLongest = 1, kShortest = 0.01;
  double pause = kLongest;
  for (double limit : {options_.stall_warning, options_.timeout})
    if (limit > 0) pause = std::min(pause, std::max(limit / 8, kShortest));
  next_look_ = all.empty() ? Clock::time_point::max()
                           : now + std::chrono::duration_cast<Clock::duration>(
                                       std::chrono::duration<double>(pause));
}

// Some names tell enough: a rank that does not come lacks all tensors of a model.
void EagerLane::Warn(const std::vector<Late>& late) const {
  constexpr size_t kMostNamed = 5;
  const CommunicatorOptions& o = communicator_->options();
  std::string text;
  for (size_t i = 0; i < std::min(late.size(), kMostNamed); ++i) {
    const double seconds = late[i].seconds;
    const double shown =
        seconds < 10 ? std::round(seconds * 10) / 10 : std::round(seconds);
    text += (i > 0 ? "; " : "") + MissingText(*late[i].waiting, o.members, shown);
  }
  if (late.empty()) return;
  if (late.size() > kMostNamed)
    text += "; and " + std::to_string(late.size() - kMostNamed) + " more operations";
  std::fprintf(stderr, "[ringjax rank %d] %s%s; still waiting\n",
               o.members[communicator_->rank()], communicator_->Prefix().c_str(),
               text.c_str());
}

}  // namespace ringjax
