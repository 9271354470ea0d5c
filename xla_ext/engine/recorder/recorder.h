// Recorder: the latest calls of a process, and totals of all its calls. It is always
// on, and no result depends on it.
//
// Each call has three instants on the clock of this process: when it was entered, when
// all ranks had agreed, and when it was done. Up to the second instant the call waits
// for other ranks, after it the call moves data. So it takes no clock of another host
// to tell a slow network from a straggler: the rank that waits least is the one for
// which all others wait.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "base/status.h"
#include "collective/schedule.h"

namespace ringjax {

// One call, or one operation of an eager lane.
struct Event {
  using Clock = std::chrono::steady_clock;

  static constexpr size_t kMostName = 55;  // bytes; a longer name is cut

  Collective op = Collective::kBarrier;
  bool named = false;       // an eager operation; `entered`: its submission
  bool device = false;      // a device moves the data, later than `done`
  bool overlapped = false;  // the program computes during the call
  Code outcome = Code::kOk;
  uint8_t length = 0;  // bytes of `name`
  char name[kMostName];
  int set = 0;  // number of the process set
  uint32_t epoch = 0;
  uint64_t sequence = 0;                    // seq of the call that moved the data
  uint64_t bytes = 0;                       // size of the tensors
  Clock::time_point entered, agreed, done;  // agreed: not set without agreement
  std::string_view algorithm;               // its name in the table

  static Event Now();  // an event that is entered now
  void SetName(std::string_view text);
  double wait_seconds() const;
  double move_seconds() const;  // 0 without agreement
};

// Totals of one collective in one lane of one process set.
struct Totals {
  // Numbers of calls by duration. Bucket 0: below 1 us; bucket b: from 2^(b-1) us and
  // below 2^b us; the last bucket counts all longer calls, too.
  static constexpr size_t kBuckets = 26;
  using Histogram = std::array<uint64_t, kBuckets>;

  uint64_t calls = 0, bytes = 0, failures = 0;
  double wait_seconds = 0, move_seconds = 0, most_waited = 0;
  double device_seconds = 0;  // seconds in which a device moved data
  Histogram wait{}, move{};
};

// Seconds in which at least one call waited, and in which at least one call moved data.
// Time that several calls share counts once. A lower bound: time before the latest end
// that is counted so far is never added.
struct Busy {
  double waiting = 0, moving = 0;
};

// Receives each event on the thread that adds it, without the lock of the recorder.
class Listener {
 public:
  virtual ~Listener() = default;
  virtual void Heard(const Event& event) = 0;
};

// A ring buffer of the latest events, and totals of all events. Thread-safe.
class Recorder {
 public:
  using Key = std::tuple<int, bool, Collective>;  // set, named, op

  // Keeps the latest `capacity` events. `who`: the process in texts, such as "rank 3".
  // `path` is the file that Dump writes. If it is empty, Dump writes no file.
  Recorder(size_t capacity, std::string who, std::string path);

  void Add(const Event& event);
  void AddDevice(const Key& key, double seconds);
  // For a call without an event of its own; see CommunicatorOptions::device_index.
  void AddBytes(const Key& key, uint64_t bytes);
  // The events kept, oldest first. `*count`: how many events were ever added.
  std::vector<Event> Latest(uint64_t* count = nullptr) const;
  // Keeps the latest `capacity` events from now on.
  void Keep(size_t capacity);
  // Returns the events after the first `*seen` as lines of JSON, with the seconds of
  // Event::Clock, and sets `*seen` to count(). `*lost`: how many are no longer kept.
  std::string LinesSince(uint64_t* seen, uint64_t* lost) const;
  // Replaces the listener; null removes it.
  void Tell(std::shared_ptr<Listener> listener);
  std::map<Key, Totals> totals() const;
  Busy busy() const;
  uint64_t count() const;  // number of all events ever added

  // For the end of a job: writes the events kept to the file, as lines of JSON, and the
  // path to standard error. Only the first call writes, if there are events and a path.
  void Dump(const std::string& reason);
  // The path of the file that Dump has written; empty if there is none.
  std::string dumped() const;

 private:
  std::string Write(const std::string& reason) const;  // returns the error, or ""
  std::vector<Event> InOrder(size_t most) const;

  const std::string who_, path_;
  mutable std::mutex mutex_;  // guards all members below
  size_t capacity_;
  size_t oldest_ = 0;  // index of the oldest event in ring_
  std::vector<Event> ring_;
  std::shared_ptr<Listener> listener_;
  uint64_t count_ = 0;
  std::map<Key, Totals> totals_;
  Busy busy_;
  Event::Clock::time_point waited_, moved_;  // busy_ includes the time up to here
  bool ended_ = false, written_ = false;
};

}  // namespace ringjax
