// A call that waits for long: whom it waits for, where they are, what is said about it.
// See communicator.h; what follows from the end of its time is in blame.cc.
#include <algorithm>
#include <cstdio>
#include <utility>

#include "engine/communicator/communicator.h"

namespace ringjax {

Status Communicator::OnStall(const Call& call, double seconds,
                             const std::vector<int>& peers, bool* end) {
  RJ_TRY(CheckLeft(entered()));
  if (!noted_) NoteWaiting(call, peers);
  const double warning = options_.stall_warning;
  if (patience_.MustAsk(seconds, warning, lane_.timeout)) AskWhereTheyAre(call, peers);
  const bool warns = patience_.MustWarn(seconds, warning);
  if (!warns && !*end) return OkStatus();
  if (!patience_.Settled(seconds, AllAnswered(Sightings(Others())))) {
    *end = false;  // a moment longer, and the error can say more
    return OkStatus();
  }
  if (!warns) return OkStatus();
  patience_.Warned(seconds);
  std::vector<int> late = Late();
  if (late.empty())
    for (int peer : peers) late.push_back(options_.members[peer]);
  const std::vector<Sighting> sightings = Sightings(late);
  std::string text;
  for (size_t i = 0; i < sightings.size(); ++i) {
    const std::string tale = i < kMostTold ? Tale(sightings[i]) : "";
    text += (i > 0 ? ", " : "") + Title(sightings[i]) +
            (tale.empty() ? "" : " (" + tale + ")");
  }
  std::fprintf(stderr,
               "[ringjax %d/%d e%u] %s has waited %.0f s for %s; still waiting\n",
               options_.members[rank()], size(), options_.epoch, Where(call).c_str(),
               seconds, text.empty() ? "its peers" : text.c_str());
  return OkStatus();
}

// For others that ask where this rank is.
void Communicator::NoteWaiting(const Call& call, const std::vector<int>& peers) {
  noted_ = true;
  std::string text = "it waits in " + Where(call);
  if (!peers.empty()) text += " for rank " + std::to_string(options_.members[peers[0]]);
  std::lock_guard lock(mutex_);
  waiting_ = std::move(text);
}

void Communicator::StoppedWaiting() {
  std::lock_guard lock(mutex_);
  waiting_.clear();
}

void Communicator::AskWhereTheyAre(const Call& call, const std::vector<int>& peers) {
  const HeartbeatHooks hooks = this->hooks();
  const auto inquiry = hooks.inquiry.lock();
  if (!inquiry) return;
  // Who is known to be late, and those whose links are waited for, come first.
  std::vector<int> waited;
  for (int peer : peers) waited.push_back(options_.members[peer]);
  std::vector<int> asked;
  if (hooks.laggards) asked = hooks.laggards(entered());
  for (const auto& more : {waited, Others()})
    for (int other : more)
      if (std::find(asked.begin(), asked.end(), other) == asked.end())
        asked.push_back(other);
  if (asked.size() > kMostAsked) asked.resize(kMostAsked);
  inquiry->Ask({id(), entered(), false, asked, Where(call)});
}

void Communicator::AskAbout(uint64_t operation, const std::vector<int>& ranks,
                            const std::string& what) {
  const auto inquiry = hooks().inquiry.lock();
  if (!inquiry) return;
  std::vector<int> asked = ranks;
  if (asked.size() > kMostAsked) asked.resize(kMostAsked);
  inquiry->Ask({id(), operation, true, asked, what});
}

std::vector<Sighting> Communicator::Sightings(const std::vector<int>& ranks) const {
  if (const auto inquiry = hooks().inquiry.lock())
    return inquiry->Sightings(id(), ranks);
  std::vector<Sighting> nothing;
  for (int r : ranks) nothing.emplace_back().rank = r;
  return nothing;
}

std::vector<int> Communicator::Others() const {
  std::vector<int> others = options_.members;
  std::erase(others, options_.members[rank()]);
  return others;
}

// The heartbeats of the world tell who has not called; an answer is newer. In a process
// set there are answers only, and who gives none is as suspicious.
std::vector<int> Communicator::Late() const {
  std::vector<int> late, silent;
  const auto laggards = hooks().laggards;
  if (laggards) late = laggards(entered());
  for (const Sighting& r : Sightings(Others())) {
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
  if (late.empty() && !laggards) late = silent;
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

void Communicator::set_missing(std::function<std::string()> f) {
  std::lock_guard lock(mutex_);
  missing_ = std::move(f);
}

Trace Communicator::trace() const {
  std::unique_lock lock(mutex_);
  const auto missing = missing_;
  lock.unlock();  // it takes locks that come before this one
  const std::string what = missing && !aborted() ? missing() : "";
  lock.lock();
  Trace trace;
  trace.when = last_.end;
  if (!waiting_.empty() && !aborted()) {
    trace.any = trace.waits = true;
    trace.text = waiting_;
  } else if (!what.empty()) {
    trace.any = trace.waits = true;
    trace.when = Clock::now();
    trace.text = "it waits for " + what;
  } else if (last_.sequence > 0) {
    trace.any = true;
    trace.text = "its last call was " +
                 std::string(kCollectiveNames[static_cast<size_t>(last_.op)]);
    if (!last_.name.empty()) trace.text += " '" + last_.name + "'";
    trace.text += " (seq " + std::to_string(last_.sequence) + ")";
  }
  if (trace.any && id() != 0) trace.text += " of " + options_.name;
  return trace;
}

}  // namespace ringjax
