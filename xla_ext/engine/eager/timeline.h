// A timeline: the operations of this process over time, in a file that Perfetto and
// chrome://tracing can read while it grows.
//
// The format is Horovod's. Each operation name has one row (a "process" of the trace).
// On the row, NEGOTIATE_ALLREDUCE lasts from the submission of the first rank until all
// ranks have submitted the operation, with a mark for each rank. ALLREDUCE follows
// while the operation runs. The eager lanes report their operations while the
// operations run. The recorder reports each call of a compiled program, and each of
// JAX's own collectives, after the call has ended, and shows only the mark of this
// rank. A separate thread writes the file, so a reporting thread only takes a lock.
// Times are microseconds since the timeline was opened.
//
// The newest events are always kept: when the file is full, it is renamed to end in
// ".1", replacing an older file of that name, and a new file begins.
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

// Any thread may call any public function.
class Timeline final : public Listener {
 public:
  using Clock = Event::Clock;

  // The most bytes of the current and the renamed file together, because
  // chrome://tracing cannot open larger files.
  static constexpr uint64_t kMaxBytes = uint64_t{256} << 20;

  // Opens a timeline and replaces the file at `path`. If the file cannot be written,
  // fails with kInternal and the error of the operating system.
  static Result<std::shared_ptr<Timeline>> Open(const std::string& path,
                                                bool mark_rounds,
                                                uint64_t most_bytes = kMaxBytes);
  ~Timeline() override;
  // Writes all events reported so far. Events reported later are ignored.
  void Close();
  Timeline(const Timeline&) = delete;
  Timeline& operator=(const Timeline&) = delete;

  // The names that identify a row. `op`: "allreduce"; `set`: "" for the world, or
  // "process set 2".
  struct Row {
    std::string_view set, op, name;
  };

  void Round();                              // a round begins
  void Submitted(const Row& row, int rank);  // world rank `rank` submits the operation
  void Runs(const Row& row);                 // all ranks have submitted the operation
  // The operation has ended, or failed. `what` is "allreduce 'x' (f32[8,128], SUM)".
  void Ended(const Row& row, std::string_view what);
  void Failed(const Row& row, std::string_view why);
  void OnEvent(const Event& event) override;  // a call has ended

 private:
  enum class Phase { kIdle, kNegotiating, kRunning };
  // A row of the timeline: its process id in the trace, and its last phase in the file.
  struct RowState {
    int number = 0;
    Phase phase = Phase::kIdle;
  };

  Timeline(std::string path, std::FILE* file, bool mark_rounds, uint64_t most_bytes);
  void EndRow(const Row& row, const std::string& arguments);
  // The caller holds mutex_:
  RowState* StateOf(const Row& row, std::string_view suffix = "");
  void NameRow(const std::string& title, const RowState& state);
  void Add(std::string event);
  void Push(std::string event);
  void Begin(const RowState& state, std::string_view name, const std::string& stamp);
  void End(const RowState& state, const std::string& stamp,
           std::string_view arguments = "");
  std::string Stamp() const { return Stamp(Clock::now()); }
  std::string Stamp(Clock::time_point when) const;
  // Only the writer thread calls these:
  void Write();
  void Append(const std::vector<std::string>& batch);
  void BeginFile();
  void BeginNext();

  const std::string path_;
  std::FILE* file_;  // null if the next file could not be opened
  long end_ = 0;     // offset of the end of the events in the file
  const bool mark_rounds_;
  const uint64_t most_bytes_;  // limit of one file
  const Clock::time_point start_;
  const int64_t epoch_us_;  // start_ as microseconds since 1970
  std::mutex mutex_;        // guards all below
  std::condition_variable changed_;
  std::unordered_map<std::string, RowState> rows_;
  std::vector<std::string> events_;  // events that are not written yet
  uint64_t bytes_ = 0;               // bytes reported for the current file
  bool stopping_ = false;
  std::thread writer_;
};

}  // namespace ringjax
