// A ShortVector holds what a std::vector would hold, and releases each element once.
#include "base/short_vector.h"

#include <algorithm>
#include <memory>
#include <random>
#include <vector>

#include "check.h"

namespace ringjax {
namespace {

using Shared = std::shared_ptr<int>;
using Short = ShortVector<Shared, 2>;

TEST(AShortVectorHoldsWhatAVectorHolds) {
  const Shared element = std::make_shared<int>(1);
  {
    std::mt19937 random(7);
    std::vector<Short> some(3);
    std::vector<std::vector<Shared>> expected(3);
    const auto next = [&](size_t below) { return random() % below; };
    for (int i = 0; i < 3000; ++i) {
      const size_t to = next(3), from = next(3), size = next(6);
      switch (next(6)) {
        case 0:
          some[to] = some[from], expected[to] = expected[from];
          break;
        case 1: {
          Short moved = std::move(some[from]);
          CHECK(some[from].empty());
          some[to] = std::move(moved);
          auto kept = std::move(expected[from]);
          expected[from].clear();
          expected[to] = std::move(kept);
          break;
        }
        case 2:
          some[to].resize(size), expected[to].resize(size);
          break;
        case 3:
          some[to].assign(&element, &element + 1), expected[to].assign(1, element);
          break;
        case 4:
          if (!expected[to].empty()) some[to].pop_back(), expected[to].pop_back();
          break;
        default:
          some[to].push_back(element), expected[to].push_back(element);
      }
      for (size_t v = 0; v < 3; ++v)
        CHECK(std::equal(some[v].begin(), some[v].end(), expected[v].begin(),
                         expected[v].end()));
    }
  }
  CHECK_EQ(element.use_count(), 1);
}

TEST(AShortVectorStoresItsFirstElementsInItself) {
  ShortVector<int, 2> list{1, 2};
  const auto inside = [&] {
    const auto* begin = reinterpret_cast<const int*>(&list);
    return list.data() >= begin && list.data() < begin + sizeof list / sizeof(int);
  };
  CHECK(inside());
  list.push_back(3);
  CHECK(!inside() && list == std::vector<int>({1, 2, 3}));
}

}  // namespace
}  // namespace ringjax
