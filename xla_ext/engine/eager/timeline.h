// A timeline: what this process exchanged when, in a file that Perfetto and
// chrome://tracing read while it grows.
//
// The format is Horovod's: one row (a "process" of the trace) for each operation's
// name; on it NEGOTIATE_ALLREDUCE from the first rank that submits it, with a mark for
// each rank, until all have; then ALLREDUCE while it runs. The eager lanes tell of
// their operations as they go on, the recorder of compiled calls when they are over; of
// these only this rank's mark is known. A thread of its own writes; whoever reports
// only takes a lock. Times are microseconds since the timeline was opened.
//
// The newest part is kept: a file that is full gets ".1" behind its name, in place of
// the one that had it, and the next one begins.
//
// Trace Event Format:
// https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <vector>

#include "base/status.h"
#include "engine/recorder/recorder.h"

namespace ringjax {

class Timeline final : public Listener {
 public:
  using Clock = Event::Clock;

  // Of both files together: chrome://tracing opens no more.
  static constexpr uint64_t kMostBytes = uint64_t{256} << 20;

  // Replaces what is at `path`. kInternal with the system's reason.
  static Result<std::shared_ptr<Timeline>> Open(const std::string& path,
                                                bool mark_rounds,
                                                uint64_t most_bytes = kMostBytes);
  ~Timeline() override;
  // Writes what has been reported; later reports go nowhere.
  void Close();
  Timeline(const Timeline&) = delete;
  Timeline& operator=(const Timeline&) = delete;

  // `op` is "allreduce"; `set` is "" for the world, else "process set 2".
  struct Row {
    std::string_view set, op, name;
  };

  void Round();                              // a round begins
  void Submitted(const Row& row, int rank);  // rank's number in the world
  void Runs(const Row& row);                 // all have submitted it
  // It ended, or failed. `what` is "allreduce 'x' (f32[8,128], SUM)".
  void Ended(const Row& row, std::string_view what);
  void Failed(const Row& row, std::string_view why);
  void Heard(const Event& event) override;  // a call is over

 private:
  enum class Phase { kIdle, kNegotiating, kRunning };
  struct Place {
    int number = 0;
    Phase phase = Phase::kIdle;
  };

  Timeline(std::string path, std::FILE* file, bool mark_rounds, uint64_t most_bytes);
  // These need the lock.
  Place* PlaceOf(const Row& row, std::string_view suffix = "");
  void NameRow(const std::string& title, const Place& place);
  void Add(std::string event);
  void Push(std::string event);
  void Begin(const Place& place, std::string_view name, const std::string& stamp);
  void End(const Place& place, const std::string& stamp,
           std::string_view arguments = "");
  std::string Stamp() const { return Stamp(Clock::now()); }
  std::string Stamp(Clock::time_point when) const;
  // The writer's.
  void Write();
  void Append(const std::vector<std::string>& batch);
  void BeginFile();
  void BeginNext();

  const std::string path_;
  std::FILE* file_;  // null: the next one could not be opened
  long end_ = 0;     // of its events
  const bool mark_rounds_;
  const uint64_t most_bytes_;  // of a file
  const Clock::time_point start_;
  const int64_t epoch_us_;  // the same moment, since 1970
  std::mutex mutex_;
  std::condition_variable changed_;
  std::unordered_map<std::string, Place> places_;
  std::vector<std::string> events_;  // not yet written
  uint64_t bytes_ = 0;               // reported for this file
  bool stopping_ = false;
  std::thread writer_;
};

}  // namespace ringjax
