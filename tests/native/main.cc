// ringjax_native_tests [filter [least-cma]]: runs the registered tests and prints a
// line for each. The filter is a part of a name, or "=" and a whole name. Messages of
// `least-cma` bytes or more are read by CMA. A test that hangs ends the program, which
// then prints its name. --list prints all names.
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "check.h"
#include "engine/call/route.h"

namespace {

constexpr unsigned kSecondsPerTest = 300;
const char* running = "";

void OnAlarm(int) {
  for (const char* text : {"TIMEOUT ", running, "\n"})
    if (write(STDERR_FILENO, text, std::strlen(text)) < 0) break;
  _exit(2);
}

bool Chosen(const char* name, const char* filter) {
  if (filter[0] == '=') return std::strcmp(name, filter + 1) == 0;
  return std::strstr(name, filter) != nullptr;
}

}  // namespace

// The tcp provider of libfabric loses 8 bytes with some endpoints. AddressSanitizer
// calls this function.
extern "C" const char* __lsan_default_suppressions() { return "leak:libfabric.so"; }

int main(int argc, char** argv) {
  using Clock = std::chrono::steady_clock;
  const char* filter = argc > 1 ? argv[1] : "";
  if (argc > 2) ringjax::least_cma = std::strtoull(argv[2], nullptr, 10);
  if (std::strcmp(filter, "--list") == 0) {
    for (const auto& test : ringjax::testing::Tests()) std::puts(test.name);
    return 0;
  }
  signal(SIGALRM, OnAlarm);
  int passed = 0, failed = 0;
  for (const auto& test : ringjax::testing::Tests()) {
    if (!Chosen(test.name, filter)) continue;
    running = test.name;
    ringjax::testing::failures = 0;
    alarm(kSecondsPerTest);
    const auto start = Clock::now();
    test.body();
    const std::chrono::duration<double> seconds = Clock::now() - start;
    const bool ok = ringjax::testing::failures == 0;
    ++(ok ? passed : failed);
    std::printf("%s %s (%.2f s)\n", ok ? "ok  " : "FAIL", test.name, seconds.count());
    std::fflush(stdout);
  }
  std::printf("%d passed, %d failed\n", passed, failed);
  // A filter that matches nothing is a mistake, not a success.
  return failed == 0 && passed > 0 ? 0 : 1;
}
