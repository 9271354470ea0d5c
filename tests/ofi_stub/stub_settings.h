// The settings of the stub libfabric, and `Refuse`, which ends the process of a caller
// that breaks a rule of libfabric. A real provider would corrupt memory or hang.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <sstream>
#include <vector>

#include "../cuda_stub/stub_knobs.h"
#include "transport/ofi.h"

namespace ringjax::ofi {

// Constants that callers may use and ringjax does not.
inline constexpr uint64_t kMsg = 1ull << 1, kInjectComplete = 1ull << 26,
                          kTransmitComplete = 1ull << 27,
                          kDeliveryComplete = 1ull << 28, kLocalComm = 1ull << 51,
                          kRemoteComm = 1ull << 52;
inline constexpr int kProgressAuto = 1, kThreadSafe = 1, kAvUnspec = 0, kWaitSet = 2,
                     kEnosys = 38;

[[noreturn]] inline void Refuse(const std::string& sentence) {
  std::fprintf(stderr, "libfabric stub: %s\n", sentence.c_str());
  std::abort();
}

inline void Require(bool holds, const char* sentence) {
  if (!holds) Refuse(sentence);
}

inline std::vector<std::string> Split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::istringstream rest(text);
  for (std::string part; std::getline(rest, part, separator);) parts.push_back(part);
  return parts;
}

inline bool Contains(const std::string& list, const std::string& word) {
  for (const std::string& part : Split(list, ','))
    if (part == word) return true;
  return false;
}

// "7:4:00ff" overwrites two bytes of the seventh message, from its fifth byte on.
// "7:20" makes the seventh message 20 bytes long. 0 stands for no message.
struct Change {
  size_t message = 0, number = 0;
  std::string bytes;

  explicit Change(const char* variable) {
    const std::vector<std::string> parts = Split(stub::Knob(variable), ':');
    if (parts.size() < 2) return;
    message = std::stoul(parts[0]);
    number = std::stoul(parts[1]);
    for (size_t i = 0; parts.size() > 2 && i + 1 < parts[2].size(); i += 2)
      bytes += static_cast<char>(std::stoi(parts[2].substr(i, 2), nullptr, 16));
  }
};

// The settings are read for each endpoint, so that a test in one process can give two
// endpoints different settings. README.md describes them.
struct Settings {
  int eagain = static_cast<int>(stub::KnobNumber("OFI_STUB_EAGAIN", 0));
  bool reorder = stub::KnobNumber("OFI_STUB_REORDER", 0) != 0;
  bool lazy = stub::KnobNumber("OFI_STUB_LAZY", 0) != 0;
  bool tell_lost = stub::KnobNumber("OFI_STUB_TELL_LOST", 0) != 0;
  int unexpected = static_cast<int>(stub::KnobNumber("OFI_STUB_UNEXPECTED", 0));
  double silent_after = stub::KnobNumber("OFI_STUB_SILENT_AFTER", 1e18);
  Change change{"OFI_STUB_CHANGE"}, length{"OFI_STUB_LENGTH"};
  stub::Failures fail{"OFI_STUB_FAIL"};
  std::minstd_rand random{static_cast<unsigned>(stub::KnobNumber("OFI_STUB_SEED", 1))};

  bool Draws(int percent) { return static_cast<int>(random() % 100) < percent; }
};

inline stub::Log g_log{"OFI_STUB_LOG"};

}  // namespace ringjax::ofi
