// Sends and handles kWaits messages. See wait_reports.h.
#include "engine/heartbeat/wait_reports.h"

#include <algorithm>
#include <cstring>
#include <string_view>
#include <utility>

namespace ringjax {
namespace {

constexpr int kLaneShift = 30;     // the bits of WaitRecord::lane in a word of the wire
constexpr size_t kMaxInBeat = 96;  // waits in one message, which fits in kMaxText bytes
constexpr size_t kMaxKept = 4096;  // waits of one peer that are kept until TakeWaits
constexpr size_t kMaxPlace = 180;  // bytes of the text of SetLocation

}  // namespace

void WaitReports::ShareWaits(std::shared_ptr<Recorder> recorder) {
  std::lock_guard lock(connections_->mutex());
  recorder_ = std::move(recorder);
  shared_ = recorder_ ? recorder_->count() : 0;
}

void WaitReports::SetLocation(const std::string& place) {
  std::lock_guard lock(connections_->mutex());
  where_ = std::string(Cut(place, kMaxPlace));
}

std::map<int, PeerWaits> WaitReports::TakeWaits() {
  std::lock_guard lock(connections_->mutex());
  std::map<int, PeerWaits> all;
  for (auto& [rank, waits] : waits_) {
    all[rank] = waits;
    waits.latest.clear();
  }
  return all;
}

std::vector<WaitRecord> WaitsSince(const Recorder& recorder, uint64_t* seen,
                                   size_t most) {
  std::vector<WaitRecord> waits;
  for (const Event& event : recorder.Since(seen)) {
    // Messages between pairs of ranks have no sequence number.
    if (event.set != 0 || event.outcome != Code::kOk || event.sequence == 0) continue;
    const double us = std::clamp(event.wait_seconds() * 1e6, 0.0, 1e9);
    waits.push_back(
        {static_cast<uint32_t>(event.sequence), event.lane, static_cast<uint32_t>(us)});
  }
  if (waits.size() > most) waits.erase(waits.begin(), waits.end() - most);
  return waits;
}

void WaitReports::SendWaits() {
  std::lock_guard lock(connections_->mutex());
  if (!recorder_ || connections_->rank() == 0) return;
  const std::vector<WaitRecord> waits = WaitsSince(*recorder_, &shared_, kMaxInBeat);
  ControlMessage::WaitsHead head;
  head.count = static_cast<uint32_t>(waits.size());
  const Busy busy = recorder_->busy();
  head.calls = recorder_->count();
  head.wait = busy.waiting;
  head.move = busy.moving;
  std::string text = WithHead(head, "");
  for (const WaitRecord& w : waits) {
    const uint32_t words[2] = {w.sequence, w.us | static_cast<uint32_t>(w.lane)
                                                      << kLaneShift};
    text.append(reinterpret_cast<const char*>(words), sizeof words);
  }
  connections_->Send(0, ControlMessage::Type::kWaits, text + where_);
}

void WaitReports::HandleWaits(int from, const std::string& text) {
  ControlMessage::WaitsHead head;
  std::memcpy(&head, text.data(), sizeof head);
  const size_t words = 2 * sizeof(uint32_t);
  if (head.count > (text.size() - sizeof head) / words) return;  // malformed
  std::lock_guard lock(connections_->mutex());
  PeerWaits& waits = waits_[from];
  waits.calls = head.calls;
  waits.wait_seconds = head.wait;
  waits.move_seconds = head.move;
  for (size_t i = 0; i < head.count; ++i) {
    uint32_t word[2];
    std::memcpy(word, text.data() + sizeof head + i * words, words);
    const auto lane = static_cast<Lane>(word[1] >> kLaneShift);
    waits.latest.push_back(
        {word[0], lane, word[1] & ((uint32_t{1} << kLaneShift) - 1)});
  }
  if (waits.latest.size() > kMaxKept)
    waits.latest.erase(waits.latest.begin(), waits.latest.end() - kMaxKept);
  waits.place = Printable(
      std::string_view(text).substr(sizeof head + head.count * words), kMaxPlace);
}

}  // namespace ringjax
