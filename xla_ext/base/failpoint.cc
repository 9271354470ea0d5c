// Implements failpoint.h: stores the armed failpoints and performs their actions.
#include "base/failpoint.h"

#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <mutex>
#include <thread>
#include <vector>

namespace ringjax {
namespace {

struct Armed {
  size_t point;
  std::string action;
  double number;
  uint64_t passage;
  uint64_t passed = 0;
};

std::mutex mutex;
std::vector<Armed>& All() {
  static std::vector<Armed> all;
  return all;
}

Status Act(const std::string& name, const Armed& armed) {
  std::fprintf(stderr, "ringjax: failpoint %s: %s\n", name.c_str(),
               armed.action.c_str());
  std::fflush(stderr);
  if (armed.action == "kill") kill(getpid(), SIGKILL);
  if (armed.action == "exit") _exit(static_cast<int>(armed.number));
  if (armed.action != "sleep")
    return Status(Code::kInternal, "failpoint " + name + ": " + armed.action);
  std::this_thread::sleep_for(std::chrono::duration<double>(armed.number));
  return OkStatus();
}

}  // namespace

Status ArmFailpoint(std::string_view point, const std::string& action, double number,
                    uint64_t passage) {
  for (size_t p = 0; p < std::size(kFailpoints); ++p) {
    if (kFailpoints[p] != point) continue;
    std::lock_guard lock(mutex);
    All().push_back({p, action, number, passage});
    armed_failpoints.fetch_or(1u << p);
    return OkStatus();
  }
  return Status(Code::kInvalidArgument, "no failpoint " + std::string(point));
}

Status HitFailpoint(Failpoint point) {
  std::vector<Armed> due;
  {
    std::lock_guard lock(mutex);
    for (Armed& each : All()) {
      if (each.point != static_cast<size_t>(point)) continue;
      ++each.passed;
      if (each.passage == 0 || each.passage == each.passed) due.push_back(each);
    }
  }
  const std::string name(kFailpoints[static_cast<size_t>(point)]);
  for (const Armed& each : due) RJ_TRY(Act(name, each));
  return OkStatus();
}

}  // namespace ringjax
