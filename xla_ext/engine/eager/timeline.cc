// Events as lines of JSON, and the thread that appends them. See timeline.h.
#include "engine/eager/timeline.h"

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstring>

#include "base/json.h"

namespace ringjax {
namespace {

// The closing bracket is written behind every batch and overwritten by the next, so
// that the file is whole whenever somebody looks.
constexpr char kClose[] = "\n]\n";

std::string Upper(std::string_view text) {
  std::string out(text);
  std::transform(out.begin(), out.end(), out.begin(),
                 [](unsigned char c) { return static_cast<char>(std::toupper(c)); });
  return out;
}

}  // namespace

Result<std::shared_ptr<Timeline>> Timeline::Open(const std::string& path,
                                                 bool mark_rounds) {
  std::FILE* file = std::fopen(path.c_str(), "we");
  if (file == nullptr)
    return Status(Code::kInternal, "the timeline " + path +
                                       " cannot be written: " + std::strerror(errno));
  return std::shared_ptr<Timeline>(new Timeline(file, mark_rounds));
}

Timeline::Timeline(std::FILE* file, bool mark_rounds)
    : file_(file), mark_rounds_(mark_rounds), start_(std::chrono::steady_clock::now()) {
  std::fputs("[\n]\n", file_);
  std::fflush(file_);
  // Lays traces of several programs over each other.
  const auto now = std::chrono::duration_cast<std::chrono::microseconds>(
      std::chrono::system_clock::now().time_since_epoch());
  Add("{\"ph\":\"M\",\"name\":\"start_time_since_epoch_in_micros\",\"pid\":0,\"args\":{"
      "\"start_time_since_epoch_in_micros\":" +
      std::to_string(now.count()) + "}}");
  writer_ = std::thread([this] { Write(); });
}

Timeline::~Timeline() {
  Close();
  std::fclose(file_);
}

void Timeline::Close() {
  std::thread writer;
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    writer.swap(writer_);
  }
  changed_.notify_one();
  if (writer.joinable()) writer.join();
}

void Timeline::Round() {
  if (!mark_rounds_) return;
  const std::lock_guard lock(mutex_);
  Add("{\"ph\":\"i\",\"name\":\"CYCLE_START\",\"s\":\"g\",\"pid\":0," + Stamp() + "}");
}

void Timeline::Submitted(const Row& row, int rank) {
  const std::lock_guard lock(mutex_);
  Place* place = PlaceOf(row);
  if (place->phase == Phase::kRunning) return;  // of another rank's next step
  if (place->phase == Phase::kIdle) {
    Begin(*place, "NEGOTIATE_" + Upper(row.op));
    place->phase = Phase::kNegotiating;
  }
  Add("{\"ph\":\"X\",\"name\":\"" + std::to_string(rank) +
      "\",\"dur\":0,\"pid\":" + std::to_string(place->number) + "," + Stamp() + "}");
}

void Timeline::Runs(const Row& row) {
  const std::lock_guard lock(mutex_);
  Place* place = PlaceOf(row);
  if (place->phase == Phase::kNegotiating) End(*place);
  Begin(*place, Upper(row.op));
  place->phase = Phase::kRunning;
}

void Timeline::Ended(const Row& row, std::string_view what) {
  const std::lock_guard lock(mutex_);
  Place* place = PlaceOf(row);
  if (place->phase == Phase::kIdle) return;  // began before the file did
  End(*place, "\"operation\":" + Quoted(what));
  place->phase = Phase::kIdle;
}

void Timeline::Failed(const Row& row, std::string_view why) {
  const std::lock_guard lock(mutex_);
  Place* place = PlaceOf(row);
  if (place->phase == Phase::kIdle) return;
  End(*place, "\"error\":" + Quoted(why));
  place->phase = Phase::kIdle;
}

Timeline::Place* Timeline::PlaceOf(const Row& row) {
  std::string title(row.op);
  title.append(".").append(row.name);
  if (!row.set.empty()) title.append(" (").append(row.set).append(")");
  auto [found, fresh] = places_.try_emplace(title);
  Place& place = found->second;
  if (fresh) {
    place.number = static_cast<int>(places_.size());
    const std::string number = std::to_string(place.number);
    Add("{\"ph\":\"M\",\"name\":\"process_name\",\"pid\":" + number +
        ",\"args\":{\"name\":" + Quoted(title) + "}}");
    Add("{\"ph\":\"M\",\"name\":\"process_sort_index\",\"pid\":" + number +
        ",\"args\":{\"sort_index\":" + number + "}}");
  }
  return &place;
}

void Timeline::Begin(const Place& place, std::string_view name) {
  Add("{\"ph\":\"B\",\"name\":" + Quoted(name) +
      ",\"pid\":" + std::to_string(place.number) + "," + Stamp() + "}");
}

void Timeline::End(const Place& place, std::string_view arguments) {
  std::string event =
      "{\"ph\":\"E\",\"pid\":" + std::to_string(place.number) + "," + Stamp();
  if (!arguments.empty()) event.append(",\"args\":{").append(arguments).append("}");
  Add(event + "}");
}

std::string Timeline::Stamp() const {
  const auto since = std::chrono::steady_clock::now() - start_;
  const auto us = std::chrono::duration_cast<std::chrono::microseconds>(since);
  return "\"ts\":" + std::to_string(us.count());
}

void Timeline::Add(std::string event) {
  if (stopping_ || bytes_ > kMostBytes) return;
  bytes_ += event.size() + 2;
  if (bytes_ > kMostBytes)
    event = "{\"ph\":\"i\",\"name\":\"FILE_IS_FULL\",\"s\":\"g\",\"pid\":0," + Stamp() +
            "}";
  events_.push_back(std::move(event));
  if (events_.size() == 1) changed_.notify_one();
}

void Timeline::Write() {
  bool first = true;
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return stopping_ || !events_.empty(); });
    if (events_.empty()) return;
    std::vector<std::string> batch;
    batch.swap(events_);
    lock.unlock();
    std::fseek(file_, first ? -3 : -static_cast<long>(sizeof kClose - 1), SEEK_END);
    for (const std::string& event : batch) {
      std::fputs(first ? "\n" : ",\n", file_);
      std::fputs(event.c_str(), file_);
      first = false;
    }
    std::fputs(kClose, file_);
    if (std::fflush(file_) != 0) std::clearerr(file_);  // a full disk stops no training
    lock.lock();
  }
}

}  // namespace ringjax
