// Devices of a process that meet in one call: threads as ranks, parts as devices.
#include "engine/communicator/device_rendezvous.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>

#include "check.h"
#include "local_world.h"

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#include <dlfcn.h>

#include <cerrno>

// Replaces the C library's pthread_create, so that a test can make it fail. Sanitizers
// already replace pthread_create.
#define RJ_THREADS_CAN_FAIL
static std::atomic<bool> no_thread_can_be_made{false};
extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attributes,
                              void* (*body)(void*), void* argument) {
  using Create = int (*)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
  static const auto real = reinterpret_cast<Create>(dlsym(RTLD_NEXT, "pthread_create"));
  return no_thread_can_be_made ? EAGAIN : real(thread, attributes, body, argument);
}
#endif

namespace ringjax {
namespace {

// The results that the devices of one rank received.
class DeviceStatuses {
 public:
  std::function<void(const Status&)> For(int64_t device) {
    return [this, device](const Status& status) {
      std::lock_guard lock(mutex_);
      all_[device].push_back(status);
      threads_.insert(std::this_thread::get_id());
      changed_.notify_all();
    };
  }
  // Returns the `n`-th status of a device, from 0.
  Status Of(int64_t device, size_t n = 0) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return all_[device].size() > n; });
    return all_[device][n];
  }
  size_t count() {
    std::lock_guard lock(mutex_);
    size_t n = 0;
    for (const auto& [device, list] : all_) n += list.size();
    return n;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<int64_t, std::vector<Status>> all_;
  std::set<std::thread::id> threads_;
};

Part PartOf(const std::shared_ptr<Communicator>& c, DeviceStatuses* statuses,
            int64_t device, std::vector<float>* in, std::vector<float>* out,
            std::vector<int64_t> devices, std::vector<int64_t> shards,
            int64_t run = 1) {
  Part part;
  part.communicator = c;
  part.call.op = Collective::kAllreduce;
  part.call.reduce_op = ReduceOp::kSum;
  part.call.name = "x";
  part.call.partition = "some devices";
  part.call.tensors.push_back(Floats(in, out));
  part.device = device;
  part.run = run;
  part.devices = std::move(devices);
  part.shards = std::move(shards);
  part.done = statuses->For(device);
  return part;
}

TEST(DevicesMeetInOneOrderForAnyOrderOfArrival) {
  World world({0, 0, 1});
  world.Each([](Communicator& c) {
    const auto shared = c.shared_from_this();
    DeviceRendezvous rendezvous;
    DeviceStatuses statuses;
    const float r = static_cast<float>(c.rank());
    // Rank 1 has other device numbers, and on all ranks the order of arrival differs.
    const std::vector<int64_t> devices =
        c.rank() == 1 ? std::vector<int64_t>{7, 5} : std::vector<int64_t>{0, 1};
    std::vector<float> in[2] = {{r, r + 1}, {10 * r, 10 * r + 1}},
                       out[2] = {{0, 0}, {0, 0}};
    for (size_t k :
         c.rank() == 2 ? std::vector<size_t>{1, 0} : std::vector<size_t>{0, 1})
      CHECK(rendezvous
                .Join(PartOf(shared, &statuses, devices[k], &in[k], &out[k], devices,
                             {0, 1}))
                .ok());
    for (int64_t device : devices) CHECK(statuses.Of(device).ok());
    CHECK(out[0] == (std::vector<float>{3, 6}));
    CHECK(out[1] == (std::vector<float>{30, 33}));
  });
}

TEST(AShardOnSeveralDevicesIsSentOnce) {
  World world({0, 1});
  world.Each([](Communicator& c) {
    const auto shared = c.shared_from_this();
    DeviceRendezvous rendezvous;
    DeviceStatuses statuses;
    // Devices 0 and 2 have shard 1; only the first one's data counts.
    std::vector<float> in[3] = {{1}, {2}, {99}}, out[3] = {{0}, {0}, {0}};
    for (int64_t d : {2, 0, 1})
      CHECK(
          rendezvous
              .Join(PartOf(shared, &statuses, d, &in[d], &out[d], {0, 1, 2}, {1, 0, 1}))
              .ok());
    for (int64_t d : {0, 1, 2}) CHECK(statuses.Of(d).ok());
    CHECK(out[0][0] == 2 && out[1][0] == 4 && out[2][0] == 2);
    const auto stats = c.log().stats();
    CHECK_EQ(stats.at("allreduce").calls, 1u);
    CHECK_EQ(stats.at("allreduce").bytes, 2 * sizeof(float));
  });
}

TEST(ADeviceThatIsAheadWaitsForTheOthersInItsNextCall) {
  World world({0, 0});
  world.Each([](Communicator& c) {
    const auto shared = c.shared_from_this();
    DeviceRendezvous rendezvous;
    DeviceStatuses statuses;
    std::vector<std::vector<float>> first(2, {1}), second(2, {10});
    for (int64_t d : {0, 1}) {
      auto& one = first[static_cast<size_t>(d)];
      auto& two = second[static_cast<size_t>(d)];
      CHECK(rendezvous.Join(PartOf(shared, &statuses, d, &one, &one, {0, 1}, {0, 1}))
                .ok());
      CHECK(rendezvous.Join(PartOf(shared, &statuses, d, &two, &two, {0, 1}, {0, 1}))
                .ok());
    }
    for (int64_t d : {0, 1}) CHECK(statuses.Of(d, 1).ok());
    CHECK(first[0][0] == 2 && first[1][0] == 2);
    CHECK(second[0][0] == 20 && second[1][0] == 20);
  });
}

TEST(NoDeviceWaitsUntilAnotherContinues) {
  World world({0, 0});
  world.Each([](Communicator& c) {
    const auto shared = c.shared_from_this();
    DeviceRendezvous rendezvous;
    std::vector<float> data[4] = {{1}, {1}, {1}, {1}};
    std::atomic<int> here{0};
    std::mutex mutex;
    std::condition_variable all;
    std::atomic<int> gone{0};
    for (int64_t d : {0, 1, 2, 3}) {
      DeviceStatuses unused;
      Part part =
          PartOf(shared, &unused, d, &data[d], &data[d], {0, 1, 2, 3}, {0, 1, 2, 3});
      part.done = [&](const Status& status) {  // as in a collective of the framework
        std::unique_lock lock(mutex);
        CHECK(status.ok());
        if (++here == 4) all.notify_all();
        all.wait(lock, [&] { return here == 4; });
        ++gone;
        all.notify_all();
      };
      CHECK(rendezvous.Join(std::move(part)).ok());
    }
    std::unique_lock lock(mutex);
    all.wait(lock, [&] { return gone == 4; });
  });
}

TEST(AMissingDeviceIsNamedWithinTheTimeout) {
  World world({0, 0}, "", 4096, 1);
  world.Each([](Communicator& c) {
    const auto shared = c.shared_from_this();
    DeviceRendezvous rendezvous;
    DeviceStatuses statuses;
    std::vector<float> data[3] = {{1}, {1}, {1}};
    for (int64_t d : {0, 1, 2}) {
      if (c.rank() == 1 && d == 1) continue;
      Part part =
          PartOf(shared, &statuses, d, &data[d], &data[d], {0, 1, 2}, {0, 1, 2});
      if (c.rank() == 1) part.call.timeout = 0.2;
      CHECK(rendezvous.Join(std::move(part)).ok());
    }
    for (int64_t d : {0, 1, 2}) {
      if (c.rank() == 1 && d == 1) continue;
      const Status status = statuses.Of(d);
      CHECK(status.code() == Code::kDeadlineExceeded || c.rank() == 0);
      CHECK(!status.ok());
      if (c.rank() == 1)
        CHECK(status.message().find("waited 0.2 s for device 1 of its own") !=
              std::string::npos);
    }
    if (c.rank() == 1) {  // the late device receives the error, too
      const Status late = rendezvous.Join(
          PartOf(shared, &statuses, 1, &data[1], &data[1], {0, 1, 2}, {0, 1, 2}));
      CHECK(late.code() == Code::kDeadlineExceeded);
      CHECK_EQ(statuses.count(), 2u);
    }
  });
}

TEST(AProbeReportsWhichDeviceIsMissing) {
  World world({0, 0});
  world.Each([](Communicator& c) {
    const auto shared = c.shared_from_this();
    const auto rendezvous = std::make_shared<DeviceRendezvous>();
    DeviceStatuses statuses;
    std::vector<float> data[3] = {{1}, {1}, {1}};
    const auto come = [&](int64_t d) {
      CHECK(rendezvous
                ->Join(PartOf(shared, &statuses, d, &data[d], &data[d], {0, 1, 2},
                              {0, 1, 2}))
                .ok());
    };
    c.log().set_missing_locally([&] { return rendezvous->Missing(); });
    CHECK(!c.log().trace().has_text);
    come(2);
    CHECK_EQ(c.log().trace().text,
             "it waits for device 0, 1 of its own to come to allreduce 'x'");
    CHECK(c.log().trace().waits);
    come(0);
    CHECK_EQ(c.log().trace().text,
             "it waits for device 1 of its own to come to allreduce 'x'");
    come(1);
    for (int64_t d : {0, 1, 2}) CHECK(statuses.Of(d).ok());
    CHECK_EQ(c.log().trace().text, "its last call was allreduce 'x' (seq 1)");
    c.log().set_missing_locally(nullptr);
  });
}

TEST(AMismatchIsTheSameErrorOnAllDevicesAndTheNextCallWorks) {
  World world({0, 0});
  world.Each([](Communicator& c) {
    const auto shared = c.shared_from_this();
    DeviceRendezvous rendezvous;
    DeviceStatuses statuses;
    std::vector<float> data[2] = {{1}, {1}};
    for (int64_t d : {0, 1}) {
      Part part = PartOf(shared, &statuses, d, &data[d], &data[d], {0, 1}, {0, 1});
      part.call.partition = c.rank() == 0 ? "2 devices (0, 1)" : "2 devices (0, 2)";
      CHECK(rendezvous.Join(std::move(part)).ok());
    }
    for (int64_t d : {0, 1}) {
      CHECK(statuses.Of(d).code() == Code::kMismatch);
      CHECK(statuses.Of(d).message().find("rank 1 sent 2 devices (0, 2), rank 0 sent 2 "
                                          "devices (0, 1)") != std::string::npos);
    }
    CHECK(statuses.Of(0).message() == statuses.Of(1).message());
    for (int64_t d : {0, 1})
      CHECK(
          rendezvous
              .Join(PartOf(shared, &statuses, d, &data[d], &data[d], {0, 1}, {0, 1}, 2))
              .ok());
    for (int64_t d : {0, 1}) CHECK(statuses.Of(d, 1).ok());
    CHECK(data[0][0] == 2 && data[1][0] == 2);
  });
}

TEST(UnsuitablePartsAreRefusedAndLeaveNoCallOpen) {
  World world({0});
  const auto shared = world.ranks[0];
  DeviceStatuses statuses;
  std::vector<float> data{1};
  {
    DeviceRendezvous rendezvous;
    CHECK(rendezvous.Join(PartOf(shared, &statuses, 3, &data, &data, {0, 1}, {0, 1}))
              .code() == Code::kInvalidArgument);  // another device
    CHECK(rendezvous.Join(PartOf(shared, &statuses, 0, &data, &data, {0, 1}, {0}))
              .code() == Code::kInvalidArgument);
    CHECK(rendezvous.Join(PartOf(shared, &statuses, 0, &data, &data, {0, 1}, {0, 2}))
              .code() == Code::kInvalidArgument);
    CHECK(rendezvous.Join(PartOf(shared, &statuses, 0, &data, &data, {0, 1}, {0, 1}))
              .ok());
    CHECK(rendezvous.Join(PartOf(shared, &statuses, 1, &data, &data, {0, 1}, {0, 0}))
              .code() == Code::kInternal);  // cut in another way
    CHECK_EQ(statuses.count(), 0u);
  }
  CHECK(statuses.Of(0).code() == Code::kUnavailable);  // it was shut down
}

#ifdef RJ_THREADS_CAN_FAIL
TEST(IfNoThreadCanBeMadeTheNextCallStillWorks) {
  World world({0});
  DeviceRendezvous rendezvous;
  DeviceStatuses statuses;
  std::vector<float> in[2] = {{1}, {2}}, out[2] = {{0}, {0}};
  const auto join = [&](int64_t device, int64_t run) {
    return rendezvous.Join(PartOf(world.ranks[0], &statuses, device, &in[device],
                                  &out[device], {0, 1}, {0, 1}, run));
  };
  no_thread_can_be_made = true;
  bool failed = false;
  try {
    failed = !join(0, 1).ok();
  } catch (const std::system_error&) {
    failed = true;
  }
  no_thread_can_be_made = false;
  CHECK(failed);
  CHECK(join(0, 2).ok() && join(1, 2).ok());
  CHECK(statuses.Of(0).ok() && statuses.Of(1).ok());
  CHECK(out[0][0] == 1 && out[1][0] == 2);
}
#endif

// Returns the threads of this process, and whether each sleeps.
std::map<std::string, bool> Threads() {
  std::map<std::string, bool> all;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/task")) {
    std::ifstream file(entry.path() / "stat");
    std::string line;
    std::getline(file, line);
    const size_t name = line.rfind(") ");
    if (name != line.npos) all[entry.path().filename()] = line[name + 2] == 'S';
  }
  return all;
}

// Waits until there are threads that are not among `before`, and all of them sleep.
void AwaitSleepOfOthersThan(const std::map<std::string, bool>& before) {
  while (true) {
    auto now = Threads();
    std::erase_if(now,
                  [&](const auto& thread) { return before.contains(thread.first); });
    const auto sleeps = [](const auto& thread) { return thread.second; };
    if (!now.empty() && std::all_of(now.begin(), now.end(), sleeps)) return;
    std::this_thread::yield();
  }
}

TEST(AShorterTimeoutEndsBeforeALongerOneThatBeganFirst) {
  World world({0});
  DeviceStatuses statuses;
  std::vector<float> x{1};
  {
    DeviceRendezvous rendezvous;
    const auto before = Threads();
    for (const double seconds : {1000.0, 0.05}) {
      const int64_t device = seconds < 1 ? 1 : 0;
      Part part =
          PartOf(world.ranks[0], &statuses, device, &x, &x, {0, 1}, {0, 1}, device + 1);
      part.call.timeout = seconds;
      CHECK(rendezvous.Join(std::move(part)).ok());
      // Otherwise the watching thread would find both deadlines when it begins.
      if (seconds > 1) AwaitSleepOfOthersThan(before);
    }
    CHECK(statuses.Of(1).code() == Code::kDeadlineExceeded);
  }
  CHECK(!statuses.Of(0).ok());
}

}  // namespace
}  // namespace ringjax
