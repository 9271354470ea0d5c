// See clock_offsets.h.
#include "engine/heartbeat/clock_offsets.h"

#include <algorithm>
#include <cstring>
#include <string_view>
#include <utility>

namespace ringjax {
namespace {

constexpr size_t kMostClocks = 256;  // readings kept until TakeClocks

}  // namespace

void ClockOffsets::AskClock(int times) {
  std::lock_guard lock(connections_->mutex());
  PeerState* const first = connections_->FirstRank();
  if (connections_->stopping() || first == nullptr) return;
  const bool under_way = clocks_left_ > 0 && SecondsNow() - clock_asked_ < timeout_;
  clocks_left_ = std::max(times, under_way ? clocks_left_ : 0);
  if (!under_way && clocks_left_ > 0) SendClock(first);
}

std::vector<ClockReading> ClockOffsets::TakeClocks() {
  std::lock_guard lock(connections_->mutex());
  return std::exchange(clocks_, {});
}

void ClockOffsets::SendClock(PeerState* state) {
  --clocks_left_;
  ControlMessage::ClockText text;
  text.asked = clock_asked_ = SecondsNow();
  connections_->Send(
      state, ControlMessage::Type::kClock,
      std::string_view(reinterpret_cast<const char*>(&text), sizeof text));
}

void ClockOffsets::OnClock(PeerState* state, const std::string& bytes) {
  const double now = SecondsNow();
  ControlMessage::ClockText text;
  std::memcpy(&text, bytes.data(), sizeof text);
  std::lock_guard lock(connections_->mutex());
  if (text.answered == 0) {
    text.came = now;
    text.answered = SecondsNow();
    connections_->Send(
        state, ControlMessage::Type::kClock,
        std::string_view(reinterpret_cast<const char*>(&text), sizeof text));
    return;
  }
  if (text.asked != clock_asked_) return;  // reply to a request that was given up
  const double held = text.answered - text.came, away = now - text.asked;
  if (!(held >= 0 && held <= away)) return;  // impossible times
  clocks_.push_back({state->peer.rank, now,
                     (text.came + text.answered) / 2 - (text.asked + now) / 2,
                     away - held});
  if (clocks_.size() > kMostClocks) clocks_.erase(clocks_.begin());
  if (clocks_left_ > 0) SendClock(state);
}

}  // namespace ringjax
