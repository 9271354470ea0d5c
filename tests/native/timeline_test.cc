// The timeline: calls of several threads, lanes beside the calls, and the change to the
// next file. tests/ranks/test_timeline.py tests the contents of the files.
#include "engine/eager/timeline.h"

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>

#include "check.h"

namespace ringjax {
namespace {

std::string TextOf(const std::filesystem::path& path) {
  std::stringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

bool Whole(const std::string& text) {
  return text.starts_with("[\n{") && text.ends_with("}\n]\n") &&
         text.find("}\n{") == text.npos;
}

struct Folder {
  Folder()
      : path(std::filesystem::temp_directory_path() /
             ("ringjax-timeline-test-" + std::to_string(getpid()))) {
    std::filesystem::create_directories(path);
  }
  ~Folder() { std::filesystem::remove_all(path); }
  std::filesystem::path path;
};

TEST(TimelineAcceptsSeveralThreadsAndContinuesInAnotherFile) {
  const Folder folder;
  const auto path = folder.path / "trace.json";
  auto opened = Timeline::Open(path, true, 1 << 16);
  CHECK(opened.ok());
  const std::shared_ptr<Timeline> timeline = opened.value();
  CHECK(Whole(TextOf(path)));
  Recorder recorder(16, "rank 0", "");
  recorder.SetListener(timeline);
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t)
    threads.emplace_back([&, t] {
      const std::string name = "x" + std::to_string(t);
      for (int i = 0; i < 300; ++i) {
        Event event = Event::Now();
        event.op = Name(Collective::kAllreduce);
        event.agreed = event.done = event.entered;
        event.SetName(name);
        recorder.Add(event);
        const Timeline::Row row{"", "allreduce", name};
        timeline->Round();
        timeline->Submitted(row, t);
        timeline->Runs(row);
        if (i % 2 == 0)
          timeline->Ended(row, "allreduce");
        else
          timeline->Failed(row, "because");
      }
    });
  for (std::thread& thread : threads) thread.join();
  timeline->Close();
  recorder.Add(Event::Now());  // the timeline is closed
  recorder.SetListener(nullptr);
  const std::string now = TextOf(path), before = TextOf(path.string() + ".1");
  CHECK(Whole(now) && Whole(before));
  CHECK(now.size() + before.size() < (1 << 16) + 4096);
  CHECK(before.size() > 1 << 14);
  CHECK(now.find("NOTHING YET") == now.npos);
}

TEST(TimelineThatCannotContinueStops) {
  const Folder folder;
  const auto path = folder.path / "gone" / "trace.json";
  std::filesystem::create_directories(path.parent_path());
  auto opened = Timeline::Open(path, false, 1024);
  CHECK(opened.ok());
  std::filesystem::remove_all(path.parent_path());
  for (int i = 0; i < 100; ++i) {
    const Timeline::Row row{"", "barrier", "x"};
    opened.value()->Submitted(row, 0);
    opened.value()->Runs(row);
    opened.value()->Ended(row, "barrier");
  }
  opened.value()->Close();
  CHECK(!std::filesystem::exists(path));
}

}  // namespace
}  // namespace ringjax
