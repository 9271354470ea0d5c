// A timeline: what the eager lanes of this process did when, in a file that Perfetto
// and chrome://tracing read while it grows.
//
// The format is Horovod's: one row (a "process" of the trace) for each operation's
// name; on it NEGOTIATE_ALLREDUCE from the first rank that submits it, with a mark for
// each rank, until all have; then ALLREDUCE while it runs. A thread of its own writes;
// whoever reports only takes a lock. Times are microseconds since the file was opened.
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

namespace ringjax {

class Timeline : public std::enable_shared_from_this<Timeline> {
 public:
  // No more than this is written: a file that cannot be opened any more helps nobody.
  static constexpr uint64_t kMostBytes = uint64_t{1} << 30;

  // Replaces what is at `path`. kInternal with the system's reason.
  static Result<std::shared_ptr<Timeline>> Open(const std::string& path,
                                                bool mark_rounds);
  ~Timeline();
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

 private:
  enum class Phase { kIdle, kNegotiating, kRunning };
  struct Place {
    int number = 0;
    Phase phase = Phase::kIdle;
  };

  Timeline(std::FILE* file, bool mark_rounds);
  // These need the lock.
  Place* PlaceOf(const Row& row);
  void Add(std::string event);
  void Begin(const Place& place, std::string_view name);
  void End(const Place& place, std::string_view arguments = "");
  std::string Stamp() const;
  void Write();

  std::FILE* const file_;
  const bool mark_rounds_;
  const std::chrono::steady_clock::time_point start_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::unordered_map<std::string, Place> places_;
  std::vector<std::string> events_;  // not yet written
  uint64_t bytes_ = 0;               // reported so far
  bool stopping_ = false;
  std::thread writer_;
};

}  // namespace ringjax
