// Helpers of both stubs: settings from the environment, calls that fail on request, a
// log in which tests count calls, and threads that block all signals.
#pragma once

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <utility>

#define STUB_EXPORT extern "C" __attribute__((visibility("default")))

namespace ringjax::stub {

inline std::string Knob(const char* name, const char* otherwise = "") {
  const char* value = std::getenv(name);
  return value != nullptr && *value != '\0' ? value : otherwise;
}

inline double KnobNumber(const char* name, double otherwise) {
  const std::string value = Knob(name);
  return value.empty() ? otherwise : std::strtod(value.c_str(), nullptr);
}

// "cuMemAlloc:2,cuInit,cuEventQuery:*" makes the second call of cuMemAlloc fail, the
// first of cuInit, and every one of cuEventQuery.
class Failures {
 public:
  explicit Failures(const char* variable) {
    const std::string all = Knob(variable) + ",";
    for (size_t begin = 0, end; (end = all.find(',', begin)) != all.npos;
         begin = end + 1) {
      std::string one = all.substr(begin, end - begin), nth = "1";
      if (const size_t colon = one.find(':'); colon != one.npos) {
        nth = one.substr(colon + 1);
        one.resize(colon);
      }
      if (!one.empty()) planned_[one] = nth == "*" ? -1 : std::atol(nth.c_str());
    }
  }

  // Counts a call and returns whether it must fail. Names may lack "_v2".
  bool Strikes(std::string_view function) {
    if (planned_.empty()) return false;
    if (function.ends_with("_v2")) function.remove_suffix(3);
    std::lock_guard lock(mutex_);
    auto found = planned_.find(std::string(function));
    if (found == planned_.end()) found = planned_.find(std::string(function) + "_v2");
    if (found == planned_.end()) return false;
    if (found->second < 0) return true;
    return found->second > 0 && --found->second == 0;
  }

 private:
  std::mutex mutex_;
  std::map<std::string, long> planned_;
};

// Lines of JSON, each in one write, so that ranks may share the file.
class Log {
 public:
  explicit Log(const char* variable) : path_(Knob(variable)) {}

  bool on() const { return !path_.empty(); }

  void Write(const std::string& line) {
    if (!on()) return;
    const int fd = open(path_.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0) return;
    const std::string text = line + "\n";
    (void)!write(fd, text.data(), text.size());
    close(fd);
  }

 private:
  std::string path_;
};

// Starts a thread that is never joined. It ends with the process, so objects that such
// threads use are never destroyed. The thread blocks all signals.
template <typename Body>
void StartThread(Body&& body) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread(std::forward<Body>(body)).detach();
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

}  // namespace ringjax::stub
