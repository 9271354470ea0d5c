// ringjax_fuzz [--runs N] [--seconds S] [--seed N] [--corpus FOLDER] [--only TARGET]
// [--keep FOLDER] [FILE…]: damages inputs of every target, keeps inputs that reach new
// code, and writes an input that breaks a target into the working folder. A FILE is not
// damaged: the target whose name is the prefix of the name of the file runs it.
//
// The fuzzer is one file, so that g++ with its sanitizers is enough. The core is
// compiled with -fsanitize-coverage=trace-pc, and pairs of successive code locations
// count as coverage, as in AFL (Zalewski, "Technical whitepaper for afl-fuzz", 2014).
#include <sanitizer/common_interface_defs.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "fuzz_targets.h"

namespace {

constexpr size_t kLocationPairs = 1 << 16;  // the size of the table of hits
constexpr size_t kMaxInput = 8192;          // bytes of an input
constexpr size_t kMaxSaved = 256;           // bytes of an input that is saved
constexpr int kMaxFiles = 40;
constexpr unsigned kSecondsPerInput = 20;
uint8_t hits[kLocationPairs];   // by the current input
uint8_t known[kLocationPairs];  // by all earlier inputs, one bit for each magnitude
// Hits are counted only in the thread that runs the targets. Other threads start and
// end at random moments, so their hits would differ between two runs of one input.
thread_local bool counting = false;
thread_local uintptr_t before = 0;

}  // namespace

extern "C" __attribute__((no_sanitize("address", "undefined"))) void
__sanitizer_cov_trace_pc() {
  if (!counting) return;
  const auto here = reinterpret_cast<uintptr_t>(__builtin_return_address(0));
  uint8_t& n = hits[((here ^ (here >> 16)) ^ (before << 1)) % kLocationPairs];
  if (n < 255) ++n;
  before = here ^ (here >> 16);
}

// A call that has lost its link sleeps until the heartbeat knows the reason. The fuzzer
// has no heartbeat, so sleep returns at once.
extern "C" int nanosleep(const timespec*, timespec*) { return 0; }

extern "C" const char* __asan_default_options() {
  return "max_allocation_size_mb=512:hard_rss_limit_mb=4096:detect_leaks=1";
}

namespace {

using ringjax::fuzz::Random;
using ringjax::fuzz::Target;
using Clock = std::chrono::steady_clock;

struct Options {
  uint64_t runs = 100000, seed = 1;  // runs: for each target
  double seconds = 0;                // for each target, 0: no limit
  std::string corpus, only, keep;
  std::vector<std::string> files;
};

std::string running_name, running_input;

void SaveInput() {
  uint64_t hash = 1469598103934665603u;
  for (char c : running_input) hash = (hash ^ static_cast<uint8_t>(c)) * 1099511628211u;
  char name[128];
  std::snprintf(name, sizeof name, "%s-%016llx", running_name.c_str(),
                static_cast<unsigned long long>(hash));
  std::ofstream(name, std::ios::binary) << running_input;
  std::fprintf(stderr, "the input is in %s (%zu bytes)\n", name, running_input.size());
}

void OnAbort(int) {  // is called if an ALWAYS or an RJ_CHECK has failed
  SaveInput();
  _exit(1);
}

void OnAlarm(int) {
  std::fprintf(stderr, "%s: an input took %u s\n", running_name.c_str(),
               kSecondsPerInput);
  SaveInput();
  _exit(1);
}

void Run(const Target& target, const std::string& input) {
  running_name = target.name;
  running_input = input;
  alarm(kSecondsPerInput);
  std::memset(hits, 0, sizeof hits);
  before = 0;
  counting = true;
  target.run(input);
  counting = false;
}

// Returns whether the last input reached new code, or some code much more often.
bool IsNew() {
  bool found = false;
  for (size_t i = 0; i < kLocationPairs; i += 8) {
    uint64_t any;
    std::memcpy(&any, hits + i, sizeof any);
    if (any == 0) continue;
    for (size_t k = i; k < i + 8; ++k) {
      if (hits[k] == 0) continue;
      const auto bit = static_cast<uint8_t>(1 << (31 - __builtin_clz(hits[k])));
      found |= (known[k] & bit) == 0;
      known[k] |= bit;
    }
  }
  return found;
}

std::string Content(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::vector<std::string> Corpus(const Target& target, const Options& options) {
  std::vector<std::string> inputs = target.seeds();
  const auto folder = std::filesystem::path(options.corpus) / target.name;
  if (!options.corpus.empty() && std::filesystem::is_directory(folder))
    for (const auto& entry : std::filesystem::directory_iterator(folder))
      inputs.push_back(Content(entry.path()));
  return inputs;
}

// Saves the shortest inputs that together reach all code that was reached.
void Save(const Target& target, std::vector<std::string> inputs,
          const Options& options) {
  const auto folder = std::filesystem::path(options.keep) / target.name;
  std::filesystem::create_directories(folder);
  std::sort(inputs.begin(), inputs.end(), [](const auto& a, const auto& b) {
    return a.size() != b.size() ? a.size() < b.size() : a < b;
  });
  std::memset(known, 0, sizeof known);
  int number = 0;
  for (const std::string& input : inputs) {
    Run(target, input);
    if (!IsNew() || input.size() > kMaxSaved || number == kMaxFiles) continue;
    std::ofstream(folder / std::to_string(number++), std::ios::binary) << input;
  }
}

uint64_t Search(const Target& target, const Options& options) {
  std::memset(known, 0, sizeof known);
  std::vector<std::string> inputs = Corpus(target, options);
  for (const std::string& input : inputs) {
    Run(target, input);
    IsNew();
  }
  Random random(options.seed);
  const size_t first = inputs.size();
  const auto start = Clock::now();
  auto seconds = [start] {
    return std::chrono::duration<double>(Clock::now() - start).count();
  };
  uint64_t runs = 0;
  for (; runs < options.runs; ++runs) {
    if (options.seconds > 0 && runs % 64 == 0 && seconds() > options.seconds) break;
    // Recently found inputs are tried more often.
    const size_t n = inputs.size();
    const size_t pick =
        random() % 2 ? n - 1 - random() % std::min<size_t>(n, 16) : random() % n;
    std::string input = inputs[pick];
    for (uint64_t i = 1 + random() % 6; i > 0; --i)
      ringjax::fuzz::Damage(&input, inputs[random() % n], kMaxInput, &random);
    Run(target, input);
    if (IsNew()) inputs.push_back(std::move(input));
  }
  alarm(0);
  const auto places =
      std::count_if(known, known + kLocationPairs, [](uint8_t k) { return k; });
  std::printf("%-12s %10llu inputs, %8.0f a second, %5zu kept, %5td places\n",
              target.name, static_cast<unsigned long long>(runs),
              static_cast<double>(runs) / std::max(seconds(), 1e-9),
              inputs.size() - first, places);
  std::fflush(stdout);
  if (!options.keep.empty()) Save(target, inputs, options);
  return runs;
}

Options Parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word.substr(0, 2) != "--") {
      options.files.push_back(word);
      continue;
    }
    const std::string value = i + 1 < argc ? argv[++i] : "";
    if (word == "--runs") {
      options.runs = std::stoull(value);
    } else if (word == "--seconds") {
      options.seconds = std::stod(value);
    } else if (word == "--seed") {
      options.seed = std::stoull(value);
    } else if (word == "--corpus") {
      options.corpus = value;
    } else if (word == "--keep") {
      options.keep = value;
    } else if (word == "--only") {
      options.only = value;
    } else {
      std::fprintf(stderr, "ringjax_fuzz: there is no option %s\n", word.c_str());
      std::exit(2);
    }
  }
  return options;
}

}  // namespace

int main(int argc, char** argv) {
  const Options options = Parse(argc, argv);
  __sanitizer_set_death_callback(SaveInput);
  signal(SIGABRT, OnAbort);
  signal(SIGALRM, OnAlarm);
  signal(SIGPIPE, SIG_IGN);
  uint64_t runs = 0;
  for (const Target& target : ringjax::fuzz::AllTargets()) {
    if (!options.only.empty() && options.only != target.name) continue;
    for (const std::string& file : options.files)
      if (std::filesystem::path(file).filename().string().find(target.name) == 0)
        Run(target, Content(file)), ++runs;
    if (options.files.empty()) runs += Search(target, options);
  }
  std::printf("%llu inputs, nothing broke\n", static_cast<unsigned long long>(runs));
  return runs > 0 ? 0 : 2;  // no target has this name
}
