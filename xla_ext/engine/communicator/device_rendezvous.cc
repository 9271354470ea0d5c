// Implements DeviceRendezvous: collects the parts of all devices, runs them as one
// call, and continues the program of each device on a thread. See device_rendezvous.h.
#include "engine/communicator/device_rendezvous.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <system_error>
#include <utility>

namespace ringjax {
namespace {

// A thread pool without a limit of threads. Each task gets a thread immediately,
// because a task may block until other tasks have run. The pool is never destroyed,
// because its tasks continue programs, which may outlive static objects at exit.
class ThreadPool {
 public:
  // Runs the task on a thread of the pool, or on this one if the system can start none.
  void Run(std::function<void()> task) {
    std::unique_lock lock(mutex_);
    if (idle_ == tasks_.size()) {
      try {
        std::thread([this] { Work(); }).detach();
      } catch (const std::system_error&) {
        lock.unlock();
        return task();
      }
      ++idle_;
    }
    tasks_.push_back(std::move(task));
    lock.unlock();
    changed_.notify_one();
  }

 private:
  void Work() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return !tasks_.empty(); });
      const std::function<void()> task = std::move(tasks_.front());
      tasks_.pop_front();
      --idle_;
      lock.unlock();
      task();
      lock.lock();
      ++idle_;
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  size_t idle_ = 0;  // number of threads that run no task; at least tasks_.size()
};

ThreadPool& pool = *new ThreadPool;

// The parts of a group. The index of a part is the index of its device in
// Part::devices.
using PartsByDevice = std::vector<Part*>;

Status CheckSameCall(const Part& a, const Part& b) {
  if (a.devices == b.devices && a.shards == b.shards && a.call.op == b.call.op &&
      a.call.name == b.call.name && a.call.tensors.size() == b.call.tensors.size() &&
      a.communicator->id() == b.communicator->id())
    return OkStatus();
  return Status(Code::kInternal, a.communicator->Prefix() + a.call.Title() +
                                     ": another device of this process is at " +
                                     b.call.Title() + ", in the same run");
}

PartsByDevice ByDevice(std::vector<Part>* parts) {
  const auto& devices = parts->front().devices;
  PartsByDevice by_device(devices.size());
  for (Part& part : *parts)
    by_device[static_cast<size_t>(
        std::find(devices.begin(), devices.end(), part.device) - devices.begin())] =
        &part;
  return by_device;
}

// Returns, for each tensor and shard, the index of the device whose copy is sent: the
// first device that holds the shard.
std::vector<std::vector<size_t>> Holders(const Part& part) {
  const size_t n = part.devices.size();
  std::vector<std::vector<size_t>> holders(part.call.tensors.size());
  for (size_t t = 0; t < holders.size(); ++t)
    for (size_t d = n; d-- > 0;) {
      const auto shard = static_cast<size_t>(part.shards[t * n + d]);
      if (holders[t].size() <= shard) holders[t].resize(shard + 1, n);
      holders[t][shard] = d;
    }
  return holders;
}

Call CombinedCall(const PartsByDevice& by_device,
                  const std::vector<std::vector<size_t>>& holders) {
  Call call = by_device[0]->call;
  call.tensors.clear();
  for (size_t t = 0; t < holders.size(); ++t)
    for (size_t d : holders[t]) call.tensors.push_back(by_device[d]->call.tensors[t]);
  return call;
}

// Copies the results to the devices that hold a shard but did not send it.
void CopyResults(const PartsByDevice& by_device,
                 const std::vector<std::vector<size_t>>& holders) {
  const size_t n = by_device.size();
  for (size_t t = 0; t < holders.size(); ++t)
    for (size_t d = 0; d < n; ++d) {
      const size_t from =
          holders[t][static_cast<size_t>(by_device[d]->shards[t * n + d])];
      const Tensor& result = by_device[from]->call.tensors[t];
      if (from != d && result.room > 0)
        std::memcpy(by_device[d]->call.tensors[t].out, result.out, result.room);
    }
}

// Calls Part::done of each part on its own thread, except the last one, which this
// thread calls.
void NotifyDone(std::vector<Part> parts, const Status& status) {
  for (size_t i = 0; i + 1 < parts.size(); ++i)
    pool.Run([done = std::move(parts[i].done), status] { done(status); });
  const auto last = std::move(parts.back().done);
  parts.clear();
  last(status);
}

void RunCombined(std::vector<Part> parts, uint64_t ticket) {
  const auto communicator = parts.front().communicator;
  Status status;
  try {
    const PartsByDevice by_device = ByDevice(&parts);
    const auto holders = Holders(*by_device[0]);
    const Call call = CombinedCall(by_device, holders);
    const auto& body = parts.front().body;
    status = body ? body(ticket, call) : communicator->RunInTurn(ticket, call);
    if (status.ok()) CopyResults(by_device, holders);
  } catch (const std::exception& e) {
    // An unused ticket would block all later calls, so the communicator is aborted.
    communicator->AbortAndNotifyPeers(Code::kInternal,
                                      std::string("failed: ") + e.what());
    status = Status(Code::kInternal, communicator->Prefix() + e.what());
  }
  NotifyDone(std::move(parts), status);
}

Status CheckPart(const Part& part) {
  const size_t n = part.devices.size();
  const bool known =
      std::count(part.devices.begin(), part.devices.end(), part.device) == 1;
  const bool whole =
      part.shards.size() == n * part.call.tensors.size() &&
      std::all_of(part.shards.begin(), part.shards.end(), [&](int64_t shard) {
        return shard >= 0 && shard < static_cast<int64_t>(n);
      });
  if (known && whole) return OkStatus();
  return Status(Code::kInvalidArgument,
                part.communicator->Prefix() + part.call.Title() + ": runs on device " +
                    std::to_string(part.device) + ", which it was not compiled for");
}

}  // namespace

DeviceRendezvous::~DeviceRendezvous() {
  std::list<Group> left;
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
    left.swap(open_);
  }
  changed_.notify_all();
  if (watch_.joinable()) watch_.join();
  for (Group& group : left) {
    const Part& part = group.parts.front();
    const Status status(Code::kUnavailable, part.communicator->Prefix() +
                                                part.call.Title() +
                                                ": the communicator was shut down");
    // Part::done may block, so it runs on a pool thread and not on this thread.
    for (Part& each : group.parts)
      pool.Run([done = std::move(each.done), status] { done(status); });
  }
}

Status DeviceRendezvous::Join(Part part) {
  RJ_TRY(CheckPart(part));
  std::unique_lock lock(mutex_);
  for (const auto& [run, status] : given_up_)
    if (run == part.run) return status;
  const auto has = [](const Group& group, int64_t device) {
    return std::any_of(group.parts.begin(), group.parts.end(),
                       [&](const Part& p) { return p.device == device; });
  };
  auto group = std::find_if(open_.begin(), open_.end(), [&](const Group& g) {
    return g.parts.front().run == part.run && !has(g, part.device);
  });
  std::list<Group> fresh;
  if (group == open_.end()) {
    // std::thread may throw, so the thread is started before the group is in open_: a
    // group without a part must never be there, because readers use the first part.
    if (!watch_.joinable()) watch_ = std::thread([this] { Watch(); });
    fresh.emplace_back().parts.reserve(part.devices.size());
    group = fresh.begin();
    group->seconds = part.call.timeout >= 0
                         ? part.call.timeout
                         : part.communicator->options().collective_timeout;
    group->deadline = group->seconds > 0 && group->seconds < 1e8
                          ? Clock::now() + ToDuration(group->seconds)
                          : Time::max();
    if (group->deadline < alarm_) changed_.notify_all();
  } else {
    RJ_TRY(CheckSameCall(part, group->parts.front()));
  }
  group->parts.push_back(std::move(part));
  open_.splice(open_.end(), fresh);
  if (group->parts.size() < group->parts.front().devices.size()) return OkStatus();
  std::vector<Part> parts = std::move(group->parts);
  open_.erase(group);
  // The ticket is taken under the lock, so that calls run in the order in which their
  // groups became complete.
  const Part& one = parts.front();
  const uint64_t ticket = one.wants_turn ? one.communicator->TakeTicket() : 0;
  lock.unlock();
  auto all = std::make_shared<std::vector<Part>>(std::move(parts));
  pool.Run([all, ticket] { RunCombined(std::move(*all), ticket); });
  return OkStatus();
}

std::string DeviceRendezvous::Group::Missing() const {
  const Part& part = parts.front();
  std::string missing;
  for (int64_t device : part.devices) {
    const bool came = std::any_of(parts.begin(), parts.end(),
                                  [&](const Part& p) { return p.device == device; });
    if (!came) missing += (missing.empty() ? "" : ", ") + std::to_string(device);
  }
  return "device " + missing + " of its own to come to " + part.call.Title();
}

std::string DeviceRendezvous::Missing() const {
  std::lock_guard lock(mutex_);
  return open_.empty() ? "" : open_.front().Missing();
}

// Gives up the program run of `late`. Returns the error for all parts of that run,
// including parts that arrive later. Sets `*what` to a predicate of this rank: "waited
// 30 s for device 1 ...". The caller holds mutex_.
Status DeviceRendezvous::GiveUp(const Group& late, std::string* what) {
  const Part& part = late.parts.front();
  *what = "waited " + Digits(late.seconds) + " s for " + late.Missing();
  constexpr size_t kMaxGivenUp = 64;
  if (given_up_.size() == kMaxGivenUp) given_up_.pop_front();
  const Status status(Code::kDeadlineExceeded,
                      part.communicator->Prefix() + part.call.Title() + ": this rank " +
                          *what + "; has the program failed there before?");
  given_up_.emplace_back(part.run, status);
  return status;
}

void DeviceRendezvous::Watch() {
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    const auto next = std::min_element(
        open_.begin(), open_.end(),
        [](const Group& a, const Group& b) { return a.deadline < b.deadline; });
    alarm_ = next == open_.end() ? Time::max() : next->deadline;
    if (alarm_ == Time::max()) {
      changed_.wait(lock);
      continue;
    }
    if (Clock::now() < alarm_) {
      changed_.wait_until(lock, alarm_);
      continue;
    }
    Group late = std::move(*next);
    open_.erase(next);
    std::string what;
    const Status status = GiveUp(late, &what);
    const auto communicator = late.parts.front().communicator;
    lock.unlock();
    // Without this abort, the other ranks would wait for this rank until their
    // timeouts.
    communicator->AbortAndNotifyPeers(Code::kDeadlineExceeded, what);
    NotifyDone(std::move(late.parts), status);
    lock.lock();
  }
}

}  // namespace ringjax
