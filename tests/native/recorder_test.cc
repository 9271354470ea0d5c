// The recorder: the calls that it keeps, its totals, and the file that it writes.
#include "engine/recorder/recorder.h"

#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>

#include "check.h"

namespace ringjax {
namespace {

using std::chrono::microseconds;

Event Allreduce(std::string_view name, int waited_us, int moved_us) {
  Event event = Event::Now();
  event.op = Name(Collective::kAllreduce);
  event.agreed = event.entered + microseconds(waited_us);
  event.done = event.agreed + microseconds(moved_us);
  event.bytes = 8;
  event.SetName(name);
  return event;
}

std::filesystem::path Scratch() {
  return std::filesystem::temp_directory_path() /
         ("ringjax-recorder-test-" + std::to_string(getpid()) + ".jsonl");
}

std::string NameOf(const Event& event) { return {event.name, event.length}; }

TEST(RecorderKeepsTheNewest) {
  Recorder recorder(3, "rank 0", "");
  CHECK(recorder.Latest().empty());
  for (int i = 0; i < 5; ++i) recorder.Add(Allreduce(std::to_string(i), 1, 1));
  const auto latest = recorder.Latest();
  CHECK_EQ(latest.size(), 3u);
  CHECK_EQ(recorder.count(), 5u);
  for (size_t i = 0; i < latest.size(); ++i)
    CHECK_EQ(NameOf(latest[i]), std::to_string(i + 2));
}

TEST(RecorderCapacityCanChange) {
  Recorder recorder(2, "rank 0", "");
  const auto add = [&](int first, int end) {
    for (int i = first; i < end; ++i) recorder.Add(Allreduce(std::to_string(i), 1, 1));
  };
  const auto names = [&] {
    std::string all;
    for (const Event& event : recorder.Latest()) all += NameOf(event);
    return all;
  };
  add(0, 3);
  CHECK_EQ(names(), "12");
  recorder.SetCapacity(4);
  CHECK_EQ(names(), "12");
  add(3, 6);
  CHECK_EQ(names(), "2345");
  recorder.SetCapacity(3);
  CHECK_EQ(names(), "345");
  add(6, 7);
  CHECK_EQ(names(), "456");
}

TEST(RecorderReturnsNewCallsAndCountsLostOnes) {
  Recorder recorder(2, "rank 0", "");
  uint64_t seen = 0, lost = 9;
  CHECK_EQ(recorder.LinesSince(&seen, &lost), "");
  CHECK(seen == 0 && lost == 0);
  for (const char* name : {"a", "b", "c"}) recorder.Add(Allreduce(name, 1, 1));
  const std::string lines = recorder.LinesSince(&seen, &lost);
  CHECK(seen == 3 && lost == 1);
  CHECK_EQ(std::count(lines.begin(), lines.end(), '\n'), 2);
  CHECK(lines.find("\"b\"") < lines.find("\"c\""));
  CHECK_EQ(recorder.LinesSince(&seen, &lost), "");
  Event overlapped = Allreduce("d", 1, 1);
  overlapped.overlapped = overlapped.device = true;
  recorder.Add(overlapped);
  const std::string one = recorder.LinesSince(&seen, &lost);
  CHECK(lost == 0 && one.find("\"device\": true, \"overlapped\": true}") != one.npos);
}

TEST(RecorderReportsToTheTimeline) {
  struct Ear final : Listener {
    void OnEvent(const Event& event) override { heard += NameOf(event); }
    std::string heard;
  };
  Recorder recorder(2, "rank 0", "");
  const auto ear = std::make_shared<Ear>();
  recorder.Add(Allreduce("a", 1, 1));
  recorder.SetListener(ear);
  recorder.Add(Allreduce("b", 1, 1));
  recorder.SetListener(nullptr);
  recorder.Add(Allreduce("c", 1, 1));
  CHECK_EQ(ear->heard, "b");
  CHECK_EQ(ear.use_count(), 1);
}

TEST(RecorderSeparatesWaitingFromMoving) {
  Recorder recorder(8, "rank 0", "");
  recorder.Add(Allreduce("a", 0, 3));
  recorder.Add(Allreduce("a", 1000, 5));
  Event failed = Allreduce("a", 0, 0);
  failed.agreed = {};  // never
  failed.done = failed.entered + microseconds(500);
  failed.outcome = Code::kUnavailable;
  recorder.Add(failed);
  Event other = Allreduce("a", 2, 2);
  other.lane = Lane::kNamed;
  recorder.Add(other);
  const auto totals = recorder.totals();
  CHECK_EQ(totals.size(), 2u);
  const Totals& t = totals.at({0, Lane::kCompiled, "allreduce"});
  CHECK_EQ(t.calls, 3u);
  CHECK_EQ(t.bytes, 24u);
  CHECK_EQ(t.failures, 1u);
  CHECK(std::abs(t.wait_seconds - 1.5e-3) < 1e-9);
  CHECK(std::abs(t.move_seconds - 8e-6) < 1e-9);
  CHECK(std::abs(t.most_waited - 1e-3) < 1e-9);
  CHECK_EQ(t.wait[0], 1u);   // below 1 us
  CHECK_EQ(t.wait[10], 1u);  // 512 .. 1023 us
  CHECK_EQ(t.wait[9], 1u);
  CHECK_EQ(t.move[2] + t.move[3], 2u);
}

TEST(RecorderCountsOverlappingTimeOnce) {
  Recorder recorder(8, "rank 0", "");
  Event one = Allreduce("a", 1000, 10);
  Event other = one;
  other.entered += microseconds(500);
  other.agreed += microseconds(500);
  other.done += microseconds(500);
  for (const Event& event : {one, other, one}) recorder.Add(event);
  CHECK(std::abs(recorder.busy().waiting - 1.5e-3) < 1e-9);
  CHECK(std::abs(recorder.busy().moving - 20e-6) < 1e-9);
}

TEST(RecorderCutsNamesBetweenCharacters) {
  Event event;
  event.SetName(std::string(Event::kMaxName - 1, 'x') + "\xc3\xa4");
  CHECK_EQ(NameOf(event), std::string(Event::kMaxName - 1, 'x'));
  event.SetName("\xc3\xa4");
  CHECK_EQ(NameOf(event), "\xc3\xa4");
}

TEST(RecorderWritesOnceAtTheEnd) {
  const std::string path = Scratch().string();
  Recorder recorder(2, "rank 3", path);
  recorder.Dump("nothing has happened");
  CHECK(!std::filesystem::exists(path) && recorder.dumped().empty());
  Recorder busy(2, "rank 3", path);
  for (const char* name : {"first", "se\"cond", "third"})
    busy.Add(Allreduce(name, 1, 1));
  busy.Dump("rank 1 is gone");
  CHECK_EQ(busy.dumped(), path);
  std::stringstream text;
  text << std::ifstream(path).rdbuf();
  CHECK(text.str().find("\"who\": \"rank 3\"") != std::string::npos);
  CHECK(text.str().find("rank 1 is gone") != std::string::npos);
  CHECK(text.str().find("\"name\": \"se\\\"cond\"") != std::string::npos);
  CHECK(text.str().find("first") == std::string::npos);
  busy.Add(Allreduce("late", 1, 1));
  std::filesystem::remove(path);
  busy.Dump("again");
  CHECK(!std::filesystem::exists(path));
}

TEST(RecorderSaysWhyItCouldNotWrite) {
  Recorder recorder(2, "rank 0", "/proc/no such place/calls.jsonl");
  recorder.Add(Allreduce("a", 1, 1));
  recorder.Dump("the end");  // and goes on
  CHECK(recorder.dumped().empty());
}

TEST(RecorderAcceptsSeveralThreads) {
  Recorder recorder(16, "rank 0", "");
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&] {
      for (int i = 0; i < 1000; ++i) recorder.Add(Allreduce("x", 1, 1));
    });
  for (int i = 0; i < 100; ++i) CHECK(recorder.Latest().size() <= 16);
  for (std::thread& thread : threads) thread.join();
  CHECK_EQ(recorder.count(), 4000u);
  CHECK_EQ(recorder.totals().begin()->second.calls, 4000u);
}

}  // namespace
}  // namespace ringjax
