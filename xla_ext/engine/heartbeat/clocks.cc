// The clock of another rank: requests and replies, with four instants each, as in NTP
// (RFC 5905). See heartbeat.h.
//
// The offset of the clocks is the difference between the midpoints on both sides. Its
// error is at most half of the round trip, without the time spent at the peer: the
// reading with the shortest round trip is the best. Each request leaves with the reply
// to the last one, so that few of them fall into a busy moment.
#include <algorithm>
#include <cstring>

#include "engine/heartbeat/heartbeat.h"

namespace ringjax {

void Heartbeat::AskClock(int times) {
  std::lock_guard lock(mutex_);
  State* first = nullptr;
  for (State& state : states_)
    if (state.peer.rank < rank_ && (!first || state.peer.rank < first->peer.rank))
      first = &state;
  if (stopping_ || first == nullptr) return;
  const bool under_way = clocks_left_ > 0 && Now() - clock_asked_ < timeout_;
  clocks_left_ = std::max(times, under_way ? clocks_left_ : 0);
  if (!under_way && clocks_left_ > 0) SendClock(first);
}

std::vector<ClockReading> Heartbeat::TakeClocks() {
  std::lock_guard lock(mutex_);
  return std::exchange(clocks_, {});
}

void Heartbeat::SendClock(State* state) {
  --clocks_left_;
  ClockText text;
  text.asked = clock_asked_ = Now();
  Send(state, Type::kClock,
       std::string_view(reinterpret_cast<const char*>(&text), sizeof text));
}

void Heartbeat::OnClock(State* state, const std::string& bytes) {
  const double now = Now();
  ClockText text;
  std::memcpy(&text, bytes.data(), sizeof text);
  std::lock_guard lock(mutex_);
  if (text.answered == 0) {
    text.came = now;
    text.answered = Now();
    Send(state, Type::kClock,
         std::string_view(reinterpret_cast<const char*>(&text), sizeof text));
    return;
  }
  if (text.asked != clock_asked_) return;  // not the last request: given up
  const double held = text.answered - text.came, away = now - text.asked;
  if (!(held >= 0 && held <= away)) return;  // impossible instants
  clocks_.push_back({state->peer.rank, now,
                     (text.came + text.answered) / 2 - (text.asked + now) / 2,
                     away - held});
  if (clocks_.size() > kMostClocks) clocks_.erase(clocks_.begin());
  if (clocks_left_ > 0) SendClock(state);
}

}  // namespace ringjax
