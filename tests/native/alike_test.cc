// The comparison of tensors by hashes: which tensors have different hashes, and the
// text about a difference. Threads are ranks, and exchange numbers through shared
// memory.
#include "engine/call/alike.h"

#include <barrier>
#include <cmath>
#include <cstring>
#include <limits>
#include <thread>

#include "check.h"

namespace ringjax {
namespace {

template <typename T>
uint64_t HashOf(const std::vector<T>& values) {
  return HashOfBytes(values.data(), values.size() * sizeof(T));
}

TEST(AHashDependsOnBitsAndLengthOnly) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<float> nans = {1, nan, 3}, same = nans;
  CHECK_EQ(HashOf(nans), HashOf(same));
  CHECK(HashOf<float>({nan}) != HashOf<float>({-nan}));
  CHECK(HashOf<float>({0.0f}) != HashOf<float>({-0.0f}));
  CHECK(HashOf<float>({1, 2}) != HashOf<float>({2, 1}));
  CHECK(HashOf<float>({0, 0}) != HashOf<float>({0, 0, 0}));
  CHECK(HashOf<float>({}) != HashOf<float>({0}));
  CHECK(HashOf<float>({1}) != HashOf<double>({1}));
  // A hash ignores types and shapes, which the call for the gradients compares.
  CHECK_EQ(HashOf<float>({0, 0}), HashOf<double>({0}));
  for (size_t count : {1, 16, 17, 100, 1000}) {  // within lanes, and behind them
    std::vector<float> values(count, 1), other = values;
    other[count - 1] = std::nextafter(1.0f, 2.0f);
    CHECK(HashOf(values) != HashOf(other));
  }
}

struct Answers {
  std::vector<std::string> texts;  // one for each rank
  std::vector<Code> codes;
  std::vector<int> exchanges;
};

// Compares on all ranks at once. Fails if the ranks pass different numbers of hashes.
Answers Ask(const std::vector<std::vector<uint64_t>>& hashes, const std::string& names,
            const std::vector<int>& members) {
  const size_t size = hashes.size();
  std::barrier<> all(static_cast<std::ptrdiff_t>(size));
  std::vector<std::vector<uint64_t>> given(size);
  Answers out{std::vector<std::string>(size), std::vector<Code>(size),
              std::vector<int>(size)};
  std::vector<std::thread> ranks;
  for (size_t r = 0; r < size; ++r)
    ranks.emplace_back([&, r] {
      auto found =
          Difference(hashes[r], names, members, static_cast<int>(r),
                     [&, r](std::vector<uint64_t>* numbers) -> Status {
                       ++out.exchanges[r];
                       given[r] = *numbers;
                       all.arrive_and_wait();
                       bool fits = true;
                       for (const auto& theirs : given) {
                         fits = fits && theirs.size() == numbers->size();
                         for (size_t i = 0; fits && i < numbers->size(); ++i)
                           (*numbers)[i] = std::max((*numbers)[i], theirs[i]);
                       }
                       all.arrive_and_wait();
                       return fits ? OkStatus() : Status(Code::kMismatch, "lengths");
                     });
      out.codes[r] = found.status().code();
      if (found.status().ok()) out.texts[r] = found.value();
    });
  for (auto& rank : ranks) rank.join();
  return out;
}

// Checks that the answers of all ranks begin with `text`.
void Expect(const Answers& answers, const std::string& text, int exchanges) {
  for (size_t r = 0; r < answers.texts.size(); ++r) {
    CHECK(answers.codes[r] == Code::kOk);
    CHECK_EQ(answers.texts[r].substr(0, answers.texts[r].find(';')), text);
    CHECK_EQ(answers.exchanges[r], exchanges);
  }
}

constexpr uint64_t kMost = std::numeric_limits<uint64_t>::max();

TEST(EqualTensorsCostOneExchange) {
  Expect(Ask({{1, 2}}, "a\nb", {0}), "", 1);
  Expect(Ask({{1, 2}, {1, 2}, {1, 2}}, "a\nb", {0, 1, 2}), "", 1);
  Expect(Ask({{}, {}}, "", {0, 1}), "", 1);
  Expect(Ask({{0, kMost}, {0, kMost}}, "a\nb", {0, 1}), "", 1);
}

TEST(TheFirstDifferentTensorAndItsRankAreNamed) {
  Expect(Ask({{1, 2}, {1, 3}}, "a\nb/c", {0, 4}),
         "'b/c' of rank 4 is not that of rank 0", 3);
  Expect(Ask({{1, 2}, {5, 3}, {5, 3}}, "a\nb", {0, 1, 7}),
         "'a' of rank 0 is not that of rank 1, the first of 2 that differ", 3);
  Expect(Ask({{kMost, 2}, {1, 2}, {2, 2}}, "a\nb", {0, 1, 2}),
         "'a' of ranks 1, 2 is not that of rank 0", 3);
  // A tensor without a name is reported with an empty name.
  Expect(Ask({{1, 2}, {1, 3}}, "a", {0, 1}), "'' of rank 1 is not that of rank 0", 3);
}

TEST(DifferentNumbersOfTensorsFailOnAllRanks) {
  for (const auto& few : std::vector<std::vector<uint64_t>>{{1}, {}}) {
    const Answers answers = Ask({{1, 2}, few}, "a\nb", {0, 1});
    for (size_t r = 0; r < 2; ++r) {
      CHECK(answers.codes[r] == Code::kMismatch);
      CHECK_EQ(answers.exchanges[r], 2);
    }
  }
}

TEST(ALostRankIsNoDifference) {
  // A rank that differed took part in the first exchange, but is lost in the second.
  int exchanges = 0;
  const std::vector<uint64_t> hashes = {1, 2};
  auto found = Difference(hashes, "a\nb", {0, 1}, 0, [&](std::vector<uint64_t>* n) {
    if (++exchanges == 1) (*n)[0] = kMost;
    return OkStatus();
  });
  CHECK(found.status().ok());
  CHECK_EQ(found.value(), std::string());
  CHECK_EQ(exchanges, 3);
}

}  // namespace
}  // namespace ringjax
