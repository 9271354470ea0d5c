// Implements HeartbeatClient: sends probes, finds late ranks, and waits at the teardown
// barrier. See heartbeat_client.h.
#include "engine/communicator/heartbeat_client.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

namespace ringjax {

void HeartbeatClient::SetHooks(HeartbeatHooks hooks) {
  std::lock_guard lock(mutex_);
  hooks_ = std::move(hooks);
}

HeartbeatHooks HeartbeatClient::hooks() const {
  std::lock_guard lock(mutex_);
  return hooks_;
}

void HeartbeatClient::AnnounceShutdown() const {
  if (state_.endpoints.segment)
    state_.endpoints.segment->Leave(state_.finished.load(std::memory_order_relaxed));
}

void HeartbeatClient::NotifyPeers(const Status& blame) const {
  if (const auto on_failure = hooks().on_failure) on_failure(blame);
}

void HeartbeatClient::ProbeCall(const std::vector<int>& peers,
                                const std::string& what) const {
  const HeartbeatHooks hooks = this->hooks();
  const auto straggler_probe = hooks.straggler_probe.lock();
  if (!straggler_probe) return;
  const uint64_t sequence = state_.sequence();
  std::vector<int> waited;
  for (int peer : peers) waited.push_back(state_.options.world_ranks[peer]);
  std::vector<int> asked;
  if (hooks.late_ranks) asked = hooks.late_ranks(sequence);
  for (const auto& more : {waited, Others()})
    for (int other : more)
      if (std::find(asked.begin(), asked.end(), other) == asked.end())
        asked.push_back(other);
  if (asked.size() > kMaxProbed) asked.resize(kMaxProbed);
  straggler_probe->SendProbes({state_.id(), sequence, false, asked, what});
}

void HeartbeatClient::ProbeOperation(uint64_t operation, const std::vector<int>& ranks,
                                     const std::string& what) const {
  const auto straggler_probe = hooks().straggler_probe.lock();
  if (!straggler_probe) return;
  std::vector<int> asked = ranks;
  if (asked.size() > kMaxProbed) asked.resize(kMaxProbed);
  straggler_probe->SendProbes({state_.id(), operation, true, asked, what});
}

std::vector<ProbeReply> HeartbeatClient::ProbeReplies(
    const std::vector<int>& ranks) const {
  if (const auto straggler_probe = hooks().straggler_probe.lock())
    return straggler_probe->ProbeReplies(state_.id(), ranks);
  std::vector<ProbeReply> nothing;
  for (int r : ranks) nothing.emplace_back().rank = r;
  return nothing;
}

std::vector<int> HeartbeatClient::Others() const {
  std::vector<int> others = state_.options.world_ranks;
  std::erase(others, state_.world_rank());
  return others;
}

// For the communicators of the world, heartbeats carry the count of entered calls, and
// a reply to a probe, which is newer, overrides this count. Other communicators have
// only the replies. If no reply shows that a rank is late, the ranks that have not
// replied count as late.
std::vector<int> HeartbeatClient::Late() const {
  std::vector<int> late, silent;
  const auto late_ranks = hooks().late_ranks;
  if (late_ranks) late = late_ranks(state_.sequence());
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

bool HeartbeatClient::AwaitTeardown(double seconds) const {
  const auto limit = Clock::now() + std::chrono::duration<double>(seconds);
  const uint32_t epoch = state_.options.epoch;
  bool told = false;
  while (true) {
    const auto teardown_barrier = hooks().teardown_barrier.lock();
    if (!teardown_barrier) return true;  // no heartbeat, so no peers
    if (!std::exchange(told, true))
      teardown_barrier->AnnounceTeardown(state_.id(), epoch);
    if (teardown_barrier->NotReady(state_.id(), epoch, state_.options.world_ranks)
            .empty())
      return true;
    if (Clock::now() >= limit) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

}  // namespace ringjax
