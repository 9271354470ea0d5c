// The test framework. TEST registers a function. CHECK and CHECK_EQ record failures and
// continue, in any thread. main.cc runs the registered functions.
#pragma once

#include <atomic>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

namespace ringjax::testing {

struct Test {
  const char* name;
  void (*body)();
};
inline std::vector<Test>& Tests() {
  static std::vector<Test> tests;
  return tests;
}
struct Registration {
  Registration(const char* name, void (*body)()) { Tests().push_back({name, body}); }
};

inline std::atomic<int> failures{0};  // failures of the running test

// Prints only the first few failures, because a broken loop would print without end.
inline void Fail(const char* file, int line, const std::string& what) {
  if (failures.fetch_add(1) >= 10) return;
  std::ostringstream text;
  text << file << ":" << line << ": " << what << "\n";
  std::cerr << text.str() << std::flush;
}

template <typename A, typename B>
void CheckEqual(const A& a, const B& b, const char* text, const char* file, int line) {
  if (a == b) return;
  std::ostringstream what;
  what << text << ": " << a << " is not " << b;
  Fail(file, line, what.str());
}

}  // namespace ringjax::testing

#define TEST(name)                                                                   \
  static void name();                                                                \
  static const ::ringjax::testing::Registration registration_of_##name(#name, name); \
  static void name()
#define CHECK(condition) \
  ((condition) ? void() : ::ringjax::testing::Fail(__FILE__, __LINE__, #condition))
#define CHECK_EQ(a, b) \
  ::ringjax::testing::CheckEqual(a, b, #a " == " #b, __FILE__, __LINE__)
