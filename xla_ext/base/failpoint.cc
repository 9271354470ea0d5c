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

std::string Name(Failpoint point) {
  return std::string(kFailpoints[static_cast<size_t>(point)]);
}

// Counts a passage, and returns what is armed for it, after a line for each.
std::vector<Armed> Due(Failpoint point) {
  std::vector<Armed> due;
  std::lock_guard lock(mutex);
  for (Armed& each : All()) {
    if (each.point != static_cast<size_t>(point)) continue;
    ++each.passed;
    if (each.passage != 0 && each.passage != each.passed) continue;
    due.push_back(each);
    std::fprintf(stderr, "ringjax: failpoint %s: %s\n", Name(point).c_str(),
                 each.action.c_str());
    std::fflush(stderr);
  }
  return due;
}

Status Act(const std::string& name, const Armed& armed) {
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
  for (const Armed& each : Due(point)) RJ_TRY(Act(Name(point), each));
  return OkStatus();
}

std::vector<uint64_t> HitFlip(Failpoint point, uint64_t bytes) {
  std::vector<uint64_t> bits;
  if (bytes == 0) return bits;
  for (const Armed& each : Due(point))
    bits.push_back(static_cast<uint64_t>(each.number) % (8 * bytes));
  return bits;
}

}  // namespace ringjax
