// The code that reads bytes of other processes, each part as a function of the bytes,
// and functions that damage bytes. A short test (hostile_bytes_test.cc) and the long,
// coverage-guided search of tests/fuzz/driver.cc use these targets.
//
// A target may return any Status. It must not crash, hang, read out of bounds, allocate
// memory without a limit, or violate an ALWAYS.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "engine/call/frame.h"

namespace ringjax::fuzz {

struct Target {
  const char* name;
  void (*run)(std::string_view input);
  std::vector<std::string> (*seeds)();  // valid inputs
};

const std::vector<Target>& ParserTargets();  // fuzz_parsers.cc
const std::vector<Target>& PeerTargets();    // fuzz_peers.cc: a hostile peer

inline std::vector<Target> AllTargets() {
  std::vector<Target> all = ParserTargets();
  all.insert(all.end(), PeerTargets().begin(), PeerTargets().end());
  return all;
}

// A condition that must hold for all bytes of a peer.
#define ALWAYS(condition)                                                           \
  ((condition)                                                                      \
       ? void()                                                                     \
       : (std::fprintf(stderr, "%s:%d: not: %s\n", __FILE__, __LINE__, #condition), \
          std::abort()))

// Cuts an input into pieces. At its end, returns zeros.
class Pieces {
 public:
  explicit Pieces(std::string_view rest) : rest_(rest) {}

  uint8_t Byte() {
    if (rest_.empty()) return 0;
    const auto byte = static_cast<uint8_t>(rest_.front());
    rest_.remove_prefix(1);
    return byte;
  }
  uint64_t Word() {
    uint64_t word = 0;
    for (int i = 0; i < 8; ++i) word = word << 8 | Byte();
    return word;
  }
  // Reads a length of two bytes, then a text of at most this length.
  std::string_view Text() {
    const size_t length = Byte() * size_t{256} + Byte();
    const std::string_view text = rest_.substr(0, length);
    rest_.remove_prefix(text.size());
    return text;
  }
  bool empty() const { return rest_.empty(); }
  std::string_view rest() const { return rest_; }

 private:
  std::string_view rest_;
};

// Packs a text so that Pieces::Text reads it.
inline std::string Packed(std::string_view text) {
  std::string bytes;
  bytes += static_cast<char>(text.size() / 256);
  bytes += static_cast<char>(text.size() % 256);
  return bytes.append(text.substr(0, 65535));
}

using Random = std::mt19937_64;

// Makes one change to `input`: another bit, byte or critical number, or a piece that is
// deleted, doubled or copied from `other`.
inline void Damage(std::string* input, const std::string& other, size_t most,
                   Random* random) {
  static constexpr uint64_t kNumbers[] = {0,
                                          1,
                                          2,
                                          7,
                                          16,
                                          63,
                                          64,
                                          127,
                                          128,
                                          255,
                                          256,
                                          4095,
                                          4096,
                                          65535,
                                          65536,
                                          0x7fffffff,
                                          1u << 31,
                                          0xffffffff,
                                          uint64_t{1} << 32,
                                          INT64_MAX,
                                          UINT64_MAX,
                                          UINT64_MAX - 1};
  auto below = [random](size_t n) { return n == 0 ? 0 : (*random)() % n; };
  std::string& s = *input;
  const size_t at = below(s.size() + 1);
  const auto length = static_cast<size_t>(1 + below(below(2) ? 8 : 64));
  switch (below(10)) {
    case 0:
    case 1:
      if (at < s.size()) s[at] = static_cast<char>(s[at] ^ (1 << below(8)));
      return;
    case 2:
      if (at < s.size()) s[at] = static_cast<char>((*random)());
      return;
    case 3: {
      uint64_t number = kNumbers[below(std::size(kNumbers))];
      for (size_t i = at, n = size_t{1} << below(4); n-- > 0 && i < s.size(); ++i) {
        s[i] = static_cast<char>(number);
        number >>= 8;
      }
      return;
    }
    case 4:
      if (at < s.size())
        s[at] = static_cast<char>(s[at] + static_cast<int>(below(33)) - 16);
      return;
    case 5:
      s.erase(at, length);
      return;
    case 6:
      s.insert(at, s.substr(below(s.size() + 1), length));
      break;
    case 7:
      s.insert(at, length, static_cast<char>((*random)()));
      break;
    case 8:
      if (!other.empty()) s.insert(at, other.substr(below(other.size()), length));
      break;
    default:
      if (!other.empty()) s = s.substr(0, at) + other.substr(below(other.size()));
      break;
  }
  if (s.size() > most) s.resize(most);
}

}  // namespace ringjax::fuzz
