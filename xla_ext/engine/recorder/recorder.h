// Recorder: keeps the latest calls of a process and totals of all its calls. The
// recorder is always on, and does not influence the results of calls.
//
// Each call has three instants on the clock of this process: when it was entered, when
// all ranks had agreed, and when it was done. Up to the second instant the call waits
// for other ranks, and after it the call moves data. So the durations alone, without a
// comparison of clocks between hosts, separate a slow network from a straggler: all
// other ranks wait for the rank that waits least.
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

// How the program makes a call. JAX's own collectives are a lane of their own, because
// the sequence numbers of their communicators are independent of those of the job.
enum class Lane : uint8_t { kCompiled = 0, kNamed, kJax };
inline constexpr std::string_view kLaneNames[] = {"compiled", "named", "jax"};
constexpr std::string_view Name(Lane lane) {
  return kLaneNames[static_cast<int>(lane)];
}

// One call, or one operation of an eager lane.
struct Event {
  using Clock = std::chrono::steady_clock;

  static constexpr size_t kMaxName = 55;  // bytes; a longer name is cut

  // The name of a collective, or JAX's name of it, in memory that is never freed.
  std::string_view op = Name(Collective::kBarrier);
  Lane lane = Lane::kCompiled;  // an event of kNamed is entered when it is submitted
  bool device = false;          // a device moves the data, later than `done`
  bool overlapped = false;      // the program continues during the call
  Code outcome = Code::kOk;
  uint8_t length = 0;  // bytes of `name`
  char name[kMaxName];
  int set = 0;  // id of the process set
  uint32_t epoch = 0;
  uint64_t sequence = 0;  // seq of the call that moved the data; 0 for messages
  uint64_t bytes = 0;     // size of the tensors
  Clock::time_point entered, agreed, done;  // `agreed` is not set without agreement
  std::string_view algorithm;               // name of the route (Route::name)

  static Event Now();  // returns an event of a call that is entered now
  void SetName(std::string_view text);
  double wait_seconds() const;
  double move_seconds() const;  // 0 without agreement
};

// Totals of one collective on one process set in one lane.
struct Totals {
  // Counts of calls by duration. Bucket 0 counts calls below 1 us, and bucket b calls
  // from 2^(b-1) us to below 2^b us. The last bucket also counts all longer calls.
  static constexpr size_t kBuckets = 26;
  using Histogram = std::array<uint64_t, kBuckets>;

  uint64_t calls = 0, bytes = 0, failures = 0;
  uint64_t faults = 0;  // attempts to make a call that wrong bits spoiled
  double wait_seconds = 0, move_seconds = 0;
  double most_waited = 0;     // the longest wait of one call, in seconds
  double device_seconds = 0;  // seconds in which a device moved data
  Histogram wait{}, move{};
};

// Seconds in which at least one call waited, and in which at least one call moved data.
// Time that several calls share counts once. Both values are lower bounds: calls are
// added when they end, and the part of a call before the latest instant counted so far
// is ignored.
struct Busy {
  double waiting = 0, moving = 0;
};

// Receives each event on the thread that adds it, without the lock of the recorder.
class Listener {
 public:
  virtual ~Listener() = default;
  virtual void OnEvent(const Event& event) = 0;
};

// A ring buffer of the latest events, and totals of all events. Thread-safe.
class Recorder {
 public:
  using Key = std::tuple<int, Lane, std::string_view>;  // set, lane, op

  // Keeps the latest `capacity` events. `who` names the process in messages, such as
  // "rank 3". `path` is the file that Dump writes; if `path` is empty, Dump writes no
  // file.
  Recorder(size_t capacity, std::string who, std::string path);

  void Add(const Event& event);
  // Adds the seconds in which a device moved data to the totals of `key`.
  void AddDevice(const Key& key, double seconds);
  // Adds the bytes of a call for which Add is not called (see
  // CommunicatorOptions::device_index).
  void AddBytes(const Key& key, uint64_t bytes);
  // Counts an attempt to make a call of `key` that wrong bits of this rank, or perhaps
  // of this rank, have spoiled.
  void AddFault(const Key& key);
  std::vector<Event> Latest() const;  // the stored events, oldest first
  // Keeps the latest `capacity` events from now on.
  void SetCapacity(size_t capacity);
  // Returns the events that were added after event number `*seen`, oldest first, and
  // sets `*seen` to count(). `*lost` receives how many of these events are no longer
  // stored.
  std::vector<Event> Since(uint64_t* seen, uint64_t* lost = nullptr) const;
  // Like Since, but returns the events as lines of JSON, with times in seconds of
  // Event::Clock.
  std::string LinesSince(uint64_t* seen, uint64_t* lost) const;
  // Replaces the listener. Pass null to remove it.
  void SetListener(std::shared_ptr<Listener> listener);
  std::map<Key, Totals> totals() const;
  Busy busy() const;
  uint64_t count() const;  // number of all events ever added

  // Writes the stored events as lines of JSON to `path`, and prints the path to
  // standard error. Only the first call has an effect. Does nothing if there are no
  // events or no path.
  void Dump(const std::string& reason);
  // The path of the file that Dump has written, or empty if Dump has written none.
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
