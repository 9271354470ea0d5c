// What a process has exchanged lately, and in all: always on, and nothing depends on
// it.
//
// Each call knows three instants on this process's own clock: when it came, when all
// ranks had come, and when it was over. The time before the second is waiting for
// others, the time after it is moving data, so no clock of another host is needed to
// tell a slow network from a slow rank: whoever waits least is the one all wait for.
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

struct Event {
  using Clock = std::chrono::steady_clock;

  static constexpr size_t kMostName = 55;  // bytes; the rest is left out

  Collective op = Collective::kBarrier;
  bool named = false;   // of an eager lane: the time from its submission on
  bool device = false;  // moved by a device, later than `done`
  bool beside = false;  // of the program, which went on
  Code outcome = Code::kOk;
  uint8_t length = 0;  // of the name
  char name[kMostName];
  int set = 0;  // number of the process set
  uint32_t epoch = 0;
  uint64_t sequence = 0;                    // of the call that moved it
  uint64_t bytes = 0;                       // of the tensors
  Clock::time_point entered, agreed, done;  // agreed: not set if it never was
  std::string_view algorithm;               // a name in the table

  // One that begins.
  static Event Now();
  void SetName(std::string_view text);
  double wait_seconds() const;
  double move_seconds() const;  // 0 if it was never agreed
};

// Of one collective in one lane of one process set.
struct Totals {
  // Calls by seconds: bucket b has those below 2^b microseconds and no earlier
  // bucket's; the last one all others.
  static constexpr size_t kBuckets = 26;
  using Histogram = std::array<uint64_t, kBuckets>;

  uint64_t calls = 0, bytes = 0, failures = 0;
  double wait_seconds = 0, move_seconds = 0, most_waited = 0;
  double device_seconds = 0;  // of those that a device has moved
  Histogram wait{}, move{};
};

// Seconds in which at least one call waited, or moved data; calls that overlap count
// once.
struct Busy {
  double waiting = 0, moving = 0;
};

// Hears of calls at once, on the threads that have made them.
class Listener {
 public:
  virtual ~Listener() = default;
  virtual void Heard(const Event& event) = 0;
};

class Recorder {
 public:
  using Key = std::tuple<int, bool, Collective>;  // set, named, op

  // Keeps that many events of `who`, "rank 3". `path`: of the file for the end of a
  // job; empty: none.
  Recorder(size_t capacity, std::string who, std::string path);

  void Add(const Event& event);  // from any thread
  void AddDevice(const Key& key, double seconds);
  void AddBytes(const Key& key, uint64_t bytes);  // of a call that another stands for
  // The oldest first. `*count`: of all that were ever added up to the last of them.
  std::vector<Event> Latest(uint64_t* count = nullptr) const;
  // Keeps so many from now on; the newest stay.
  void Keep(size_t capacity);
  // Those after the first `*seen`, which is moved on, as lines of JSON with the seconds
  // of Event::Clock; `*lost` of them are not kept any more.
  std::string LinesSince(uint64_t* seen, uint64_t* lost) const;
  void Tell(std::shared_ptr<Listener> listener);  // from now on; null: nobody
  std::map<Key, Totals> totals() const;
  Busy busy() const;
  uint64_t count() const;  // of all that were ever added

  // The job has ended: writes what there is, once, as lines of JSON, and tells where on
  // standard error. Without effect if nothing was recorded, or there is no path.
  void Dump(const std::string& reason);
  // Where that file is; empty: there is none.
  std::string dumped() const;

 private:
  std::string Write(const std::string& reason) const;  // empty, or why not
  std::vector<Event> InOrder(size_t most) const;

  const std::string who_, path_;
  mutable std::mutex mutex_;  // guards all below
  size_t capacity_;
  size_t oldest_ = 0;  // in a ring that is full
  std::vector<Event> ring_;
  std::shared_ptr<Listener> listener_;
  uint64_t count_ = 0;
  std::map<Key, Totals> totals_;
  Busy busy_;
  Event::Clock::time_point waited_, moved_;  // up to here it is in busy_
  bool ended_ = false, written_ = false;
};

}  // namespace ringjax
