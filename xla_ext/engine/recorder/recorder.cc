// Implements Recorder: keeps the latest events and the totals, and writes the file at
// the end of a job. See recorder.h.
#include "engine/recorder/recorder.h"

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <utility>

#include "base/json.h"

namespace ringjax {
namespace {

double Seconds(Event::Clock::duration time) {
  return std::chrono::duration<double>(time).count();
}

size_t BucketOf(double seconds) {
  const double us = std::clamp(seconds * 1e6, 0.0, 1e15);
  const auto bucket = static_cast<size_t>(std::bit_width(static_cast<uint64_t>(us)));
  return std::min(bucket, Totals::kBuckets - 1);
}

// Adds to `*seconds` the part of the time from `from` to `to` that comes after
// `*counted`, and advances `*counted` to `to`.
void AddUncounted(Event::Clock::time_point from, Event::Clock::time_point to,
                  Event::Clock::time_point* counted, double* seconds) {
  from = std::max(from, *counted);
  if (to <= from) return;
  *seconds += Seconds(to - from);
  *counted = to;
}

bool IsSet(Event::Clock::time_point when) { return when != Event::Clock::time_point(); }

// Returns the seconds from `zero` to `when` as JSON, or "null" if `when` is not set.
std::string JsonSeconds(Event::Clock::time_point when, Event::Clock::time_point zero) {
  if (!IsSet(when)) return "null";
  char text[32];
  std::snprintf(text, sizeof text, "%.6f", Seconds(when - zero));
  return text;
}

std::string JsonLine(const Event& e, Event::Clock::time_point zero) {
  const std::string_view name(e.name, e.length);
  char numbers[160];
  std::snprintf(numbers, sizeof numbers,
                ", \"set\": %d, \"epoch\": %" PRIu32 ", \"seq\": %" PRIu64
                ", \"bytes\": %" PRIu64 ", \"code\": %d",
                e.set, e.epoch, e.sequence, e.bytes, static_cast<int>(e.outcome));
  return "{\"op\": " + Quoted(e.op) + ", \"name\": " + Quoted(name) +
         ", \"lane\": " + Quoted(Name(e.lane)) + numbers +
         ", \"algorithm\": " + Quoted(e.algorithm) +
         ", \"entered\": " + JsonSeconds(e.entered, zero) +
         ", \"agreed\": " + JsonSeconds(e.agreed, zero) +
         ", \"done\": " + JsonSeconds(e.done, zero) +
         (e.device ? ", \"device\": true" : "") +
         (e.overlapped ? ", \"overlapped\": true" : "") + "}\n";
}

}  // namespace

Event Event::Now() {
  Event event;
  event.entered = Clock::now();
  return event;
}

void Event::SetName(std::string_view text) {
  length = static_cast<uint8_t>(std::min(text.size(), kMaxName));
  while (length > 0 && length < text.size() &&
         (static_cast<unsigned char>(text[length]) & 0xC0) == 0x80)
    --length;  // do not cut a UTF-8 character
  std::memcpy(name, text.data(), length);
}

double Event::wait_seconds() const {
  return Seconds((IsSet(agreed) ? agreed : done) - entered);
}

double Event::move_seconds() const {
  return IsSet(agreed) ? Seconds(done - agreed) : 0;
}

Recorder::Recorder(size_t capacity, std::string who, std::string path)
    : who_(std::move(who)),
      path_(std::move(path)),
      capacity_(std::max<size_t>(capacity, 1)) {
  ring_.reserve(capacity_);
}

void Recorder::Add(const Event& event) {
  const double waited = event.wait_seconds(), moved = event.move_seconds();
  std::unique_lock lock(mutex_);
  if (ring_.size() < capacity_) {
    ring_.push_back(event);
  } else {
    ring_[oldest_] = event;
    oldest_ = (oldest_ + 1) % capacity_;
  }
  ++count_;
  Totals& t = totals_[{event.set, event.lane, event.op}];
  ++t.calls;
  t.bytes += event.bytes;
  t.failures += event.outcome != Code::kOk;
  t.wait_seconds += waited;
  t.move_seconds += moved;
  const auto agreed = IsSet(event.agreed) ? event.agreed : event.done;
  AddUncounted(event.entered, agreed, &waited_, &busy_.waiting);
  AddUncounted(agreed, event.done, &moved_, &busy_.moving);
  t.most_waited = std::max(t.most_waited, waited);
  ++t.wait[BucketOf(waited)];
  ++t.move[BucketOf(moved)];
  const auto listener = listener_;
  lock.unlock();
  if (listener) listener->OnEvent(event);
}

void Recorder::AddDevice(const Key& key, double seconds) {
  std::lock_guard lock(mutex_);
  totals_[key].device_seconds += seconds;
}

void Recorder::AddFault(const Key& key) {
  std::lock_guard lock(mutex_);
  ++totals_[key].faults;
}

void Recorder::AddBytes(const Key& key, uint64_t bytes) {
  std::lock_guard lock(mutex_);
  totals_[key].bytes += bytes;
}

std::vector<Event> Recorder::Latest() const {
  std::lock_guard lock(mutex_);
  return InOrder(ring_.size());
}

// Returns the newest `most` events, oldest first. The caller holds mutex_.
std::vector<Event> Recorder::InOrder(size_t most) const {
  std::vector<Event> events;
  events.reserve(most);
  for (size_t i = ring_.size() - most; i < ring_.size(); ++i)
    events.push_back(ring_[(oldest_ + i) % ring_.size()]);
  return events;
}

void Recorder::SetCapacity(size_t capacity) {
  std::lock_guard lock(mutex_);
  capacity_ = std::max<size_t>(capacity, 1);
  ring_ = InOrder(std::min(ring_.size(), capacity_));
  ring_.reserve(capacity_);
  oldest_ = 0;
}

std::vector<Event> Recorder::Since(uint64_t* seen, uint64_t* lost) const {
  std::lock_guard lock(mutex_);
  const uint64_t count = count_ - std::min(*seen, count_);
  std::vector<Event> events = InOrder(std::min<uint64_t>(count, ring_.size()));
  if (lost != nullptr) *lost = count - events.size();
  *seen = count_;
  return events;
}

std::string Recorder::LinesSince(uint64_t* seen, uint64_t* lost) const {
  std::string lines;
  for (const Event& event : Since(seen, lost)) lines += JsonLine(event, {});
  return lines;
}

void Recorder::SetListener(std::shared_ptr<Listener> listener) {
  std::lock_guard lock(mutex_);
  listener_.swap(listener);  // the old listener is released after the lock
}

std::map<Recorder::Key, Totals> Recorder::totals() const {
  std::lock_guard lock(mutex_);
  return totals_;
}

Busy Recorder::busy() const {
  std::lock_guard lock(mutex_);
  return busy_;
}

uint64_t Recorder::count() const {
  std::lock_guard lock(mutex_);
  return count_;
}

void Recorder::Dump(const std::string& reason) {
  {
    std::lock_guard lock(mutex_);
    if (std::exchange(ended_, true) || path_.empty() || count_ == 0) return;
  }
  const std::string why_not = Write(reason);
  if (why_not.empty())
    std::fprintf(stderr, "[ringjax %s] its last calls are in %s\n", who_.c_str(),
                 path_.c_str());
  else
    std::fprintf(stderr, "[ringjax %s] its last calls could not be written to %s: %s\n",
                 who_.c_str(), path_.c_str(), why_not.c_str());
  std::lock_guard lock(mutex_);
  written_ = why_not.empty();
}

std::string Recorder::dumped() const {
  std::lock_guard lock(mutex_);
  return written_ ? path_ : "";
}

std::string Recorder::Write(const std::string& reason) const {
  const std::vector<Event> latest = Latest();
  const auto zero = latest.front().entered;
  const auto age = Event::Clock::now() - zero;
  const double began =
      Seconds(std::chrono::system_clock::now().time_since_epoch() - age);
  char head[96];
  std::snprintf(head, sizeof head, ", \"began\": %.6f, \"calls\": %" PRIu64, began,
                count());
  std::string text =
      "{\"who\": " + Quoted(who_) + head + ", \"reason\": " + Quoted(reason) + "}\n";
  for (const Event& event : latest) text += JsonLine(event, zero);
  // Mode "x" (O_EXCL) never opens a symbolic link that another process has put at
  // `path_`.
  std::remove(path_.c_str());
  std::FILE* file = std::fopen(path_.c_str(), "wxe");
  if (file == nullptr) return std::strerror(errno);
  const bool whole = std::fwrite(text.data(), 1, text.size(), file) == text.size();
  const int failed = whole ? 0 : errno;
  if (std::fclose(file) != 0 || !whole) {
    const int error = whole ? errno : failed;
    std::remove(path_.c_str());  // leave no incomplete file
    return std::strerror(error);
  }
  return "";
}

}  // namespace ringjax
