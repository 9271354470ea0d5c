// Sends and handles kClock messages. See clock_offsets.h.
#include "engine/heartbeat/clock_offsets.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace ringjax {
namespace {

constexpr size_t kMaxReadings = 256;  // readings kept until TakeReadings

}  // namespace

void ClockOffsets::RequestClock(int times) {
  std::lock_guard lock(connections_->mutex());
  if (connections_->stopping() || connections_->rank() == 0) return;
  const bool under_way = requests_left_ > 0 && SecondsNow() - requested_at_ < timeout_;
  requests_left_ = std::max(times, under_way ? requests_left_ : 0);
  if (!under_way && requests_left_ > 0) SendRequest();
}

std::vector<ClockReading> ClockOffsets::TakeReadings() {
  std::lock_guard lock(connections_->mutex());
  return std::exchange(readings_, {});
}

void ClockOffsets::SendRequest() {
  --requests_left_;
  ControlMessage::ClockText text;
  text.requested = requested_at_ = SecondsNow();
  connections_->Send(0, ControlMessage::Type::kClock, WithHead(text, ""));
}

void ClockOffsets::HandleClock(int from, const std::string& bytes) {
  const double now = SecondsNow();
  ControlMessage::ClockText text;
  std::memcpy(&text, bytes.data(), sizeof text);
  std::lock_guard lock(connections_->mutex());
  if (text.replied == 0) {
    text.received = now;
    text.replied = SecondsNow();
    connections_->Send(from, ControlMessage::Type::kClock, WithHead(text, ""));
    return;
  }
  if (text.requested != requested_at_)
    return;  // a reply to a request that was given up
  const double held = text.replied - text.received, away = now - text.requested;
  if (!(held >= 0 && held <= away)) return;  // invalid times from a faulty peer
  readings_.push_back({from, now,
                       (text.received + text.replied) / 2 - (text.requested + now) / 2,
                       away - held});
  if (readings_.size() > kMaxReadings) readings_.erase(readings_.begin());
  if (requests_left_ > 0) SendRequest();
}

}  // namespace ringjax
