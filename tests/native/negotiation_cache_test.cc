// The sizes of negotiation messages. An operation is described once, and afterwards
// sent as a number; a known step needs a few bytes; and messages have a bounded size.
#include <algorithm>
#include <random>

#include "engine/eager/negotiation.h"
#include "negotiation_ranks.h"

namespace ringjax {
namespace {

TEST(NegotiationForgetsTheLeastRecentlyUsed) {
  NegotiatingRanks ranks(2, {.cache_capacity = 2});
  auto hit = [&](const char* name) {
    const uint64_t before = ranks[0].hits();
    ranks.SubmitAll(Sum(name));
    ranks.Round();
    CHECK_EQ(ranks[0].hits(), ranks[1].hits());
    return ranks[0].hits() > before;
  };
  CHECK(!hit("a") && !hit("b") && hit("a") && !hit("c") && hit("a") && !hit("b"));
  CHECK(hit("a") && hit("b") && !hit("c"));
  // A known name with another shape is described, and receives its own number.
  ranks.SubmitAll(Sum("a", {5}));
  CHECK_EQ(ranks.Round().size(), 1u);
}

TEST(NegotiationForgetsNamesThatAreNotRepeated) {
  for (size_t capacity : {0u, 3u}) {
    NegotiatingRanks ranks(2, {.cache_capacity = capacity});
    for (int i = 0; i < 50; ++i) {
      ranks.SubmitAll(Sum("noname." + std::to_string(i)));
      ranks.SubmitAll(Sum("again", {i % 2}));
      ranks.Round();
      CHECK(ranks[0].known() <= capacity);
    }
    ranks[0].Submit(Share(Sum("late")));
    ranks.Round();
    CHECK(ranks[1].known() <= capacity + 1);
    ranks[0].Expire(Collective::kAllreduce, "late", 1);
    ranks.Round();
    CHECK(ranks[1].known() <= capacity);
  }
}

TEST(NegotiationKnowsWhatAnotherRankHasDescribed) {
  NegotiatingRanks ranks(2);
  ranks[0].Submit(Share(Named(Collective::kAllgather, "g", {1})));
  ranks[1].Submit(Share(Named(Collective::kAllgather, "g", {2})));
  ranks.Round();
  ranks[0].Submit(Share(Named(Collective::kAllgather, "g", {2})));
  ranks[1].Submit(Share(Named(Collective::kAllgather, "g", {1})));
  const auto decisions = ranks.Round();
  CHECK_EQ(ranks[0].hits() + ranks[1].hits(), 2u);
  CHECK_EQ(decisions[0].fused[0].by_rank[0]->tensors[0].dims[0], 2);
  CHECK_EQ(decisions[0].fused[0].by_rank[1]->tensors[0].dims[0], 1);
}

TEST(EqualMessagesOfAllRanksAreDecidedAtOnce) {
  constexpr int kRanks = 5;
  int calls = 0, submitted = 0;
  NegotiatingRanks ranks(kRanks,
                         {.on_submission = [&](const Submission&, int first, int end) {
                           ++calls, submitted += end - first;
                         }});
  auto submit = [&](std::vector<std::string> names, int rank) {
    for (const std::string& name : names) ranks[rank].Submit(Share(Sum(name)));
  };
  for (int round = 0; round < 3; ++round) {
    calls = submitted = 0;
    for (int r = 0; r < kRanks; ++r) submit({"a", "b", "c"}, r);
    const auto decisions = ranks.Round();
    CHECK_EQ(decisions.size(), 1u);
    CHECK_EQ(decisions[0].fused.size(), 3u);
    for (size_t i = 0; i < 3; ++i) {
      CHECK_EQ(decisions[0].fused[i].any->name, std::string(1, "abc"[i]));
      CHECK_EQ(decisions[0].fused[i].id, static_cast<uint64_t>(3 * round) + i);
      for (const SubmissionPtr& s : EachOf(decisions[0].fused[i])) CHECK(s != nullptr);
    }
    CHECK_EQ(submitted, 3 * kRanks * kRanks);  // each rank hears of all
    CHECK_EQ(calls, 3 * kRanks);
  }
  // Another order on one rank, and then an operation that a rank has not submitted.
  for (int r = 0; r < kRanks; ++r)
    r == 3 ? submit({"b", "a"}, r) : submit({"a", "b"}, r);
  CHECK_EQ(ranks.Round()[0].fused.size(), 2u);
  for (int r = 1; r < kRanks; ++r) submit({"b", "c"}, r);
  CHECK(ranks.Round().empty());
  submit({"c", "b"}, 0);
  CHECK_EQ(ranks.Round()[0].fused.size(), 2u);
  CHECK_EQ(ranks[0].pending(), 0u);
}

TEST(EqualDescriptionsAreDecidedAtOnceWithoutACache) {
  NegotiatingRanks ranks(3, {.cache_capacity = 0});
  for (int round = 0; round < 2; ++round) {
    for (int r = 0; r < 3; ++r) ranks[r].Submit(Share(Sum("a")));
    CHECK_EQ(ranks.Round()[0].fused.size(), 1u);
    CHECK_EQ(ranks[0].known(), 0u);
  }
}

TEST(NegotiationOfAKnownStepIsShort) {
  constexpr int kCount = 500;
  std::mt19937 random(1);
  NegotiatingRanks ranks(2);
  std::vector<int> order(kCount);
  for (int i = 0; i < kCount; ++i) order[static_cast<size_t>(i)] = i;
  for (int step = 0; step < 4; ++step) {
    for (int i : order) ranks.SubmitAll(Sum("gradient/" + std::to_string(i)));
    const auto messages = ranks.Take();
    if (step == 1) CHECK(messages[0].size() < 10);               // one run
    if (step == 3) CHECK(messages[0].size() < 2 * kCount + 10);  // any order
    CHECK_EQ(ranks.Give(messages).size(), 1u);
    if (step == 2) std::shuffle(order.begin(), order.end(), random);
  }
  CHECK_EQ(ranks[1].hits(), 3u * kCount);
  CHECK(ranks[0].TakeMessage().empty());
}

TEST(NegotiationSpreadsVeryManyDescriptionsOverRounds) {
  NegotiatingRanks ranks(2);
  const std::string padding(1000, 'x');
  for (int i = 0; i < 3000; ++i) ranks.SubmitAll(Sum(padding + std::to_string(i)));
  size_t ran = 0, rounds = 0;
  for (; ranks[0].HasItems() && rounds < 10; ++rounds) {
    const auto messages = ranks.Take();
    CHECK(messages[0].size() < size_t{2} << 20);
    for (const Decision& d : ranks.Give(messages)) ran += d.fused.size();
  }
  CHECK_EQ(ran, 3000u);
  CHECK(rounds > 1 && rounds < 10);
}

}  // namespace
}  // namespace ringjax
