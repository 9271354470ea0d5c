// Single cases of negotiation: the decisions, their order and the texts of errors.
// negotiation_cache_test.cc tests the size of messages, and
// negotiation_simulation_test.cc random programs.
#include "engine/eager/negotiation.h"

#include <functional>

#include "engine/eager/disagreement.h"
#include "negotiation_ranks.h"

namespace ringjax {
namespace {

using Kind = Decision::Kind;

std::vector<std::string> Names(const Decision& decision) {
  std::vector<std::string> names;
  for (const Ready& ready : decision.fused) names.push_back(ready.any->name);
  return names;
}

std::string Joined(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : " ") + name;
  return text;
}

// Returns the names in each decision, such as "a b | c".
std::string Runs(const std::vector<Decision>& decisions) {
  std::string text;
  for (const Decision& d : decisions) {
    if (!text.empty()) text += " | ";
    text += d.kind == Kind::kRun    ? Joined(Names(d))
            : d.kind == Kind::kFail ? "fail " + Joined(Names(d))
                                    : "joined " + std::to_string(d.last_joined);
  }
  return text;
}

// Returns the decision for two ranks that submit `a` and `b` under one name.
std::string DecisionOf(const Submission& a, const Submission& b) {
  NegotiatingRanks ranks(2, {.prefix = "RINGJAX[world, epoch 0]: "});
  ranks[0].Submit(Share(a));
  ranks[1].Submit(Share(b));
  const auto decisions = ranks.Round();
  CHECK_EQ(decisions.size(), 1u);
  if (decisions.empty() || decisions[0].kind == Kind::kRun) return "run";
  CHECK(decisions[0].status.code() == Code::kMismatch);
  CHECK(decisions[0].fused[0].by_rank[0] && decisions[0].fused[0].by_rank[1]);
  return decisions[0].status.message();
}

TEST(NegotiationWaitsForAllAndKeepsTheOrderOfReadiness) {
  NegotiatingRanks ranks(3, {.fusion_threshold = 0});
  for (const char* name : {"a", "b", "c"}) ranks[0].Submit(Share(Sum(name)));
  for (const char* name : {"b", "c", "a"}) ranks[1].Submit(Share(Sum(name)));
  CHECK_EQ(Runs(ranks.Round()), "");
  CHECK_EQ(ranks[2].pending(), 3u);
  CHECK(!ranks[0].HasItems());
  ranks[2].Submit(Share(Sum("c")));
  CHECK_EQ(Runs(ranks.Round()), "c");
  ranks[2].Submit(Share(Sum("b")));
  ranks[2].Submit(Share(Sum("a")));
  CHECK_EQ(Runs(ranks.Round()), "b | a");
  CHECK_EQ(ranks[2].pending(), 0u);
}

TEST(NegotiationReturnsTheSubmittedObject) {
  for (size_t capacity : {0u, 8u}) {
    NegotiatingRanks ranks(2, {.cache_capacity = capacity});
    for (int step = 0; step < 3; ++step) {
      const SubmissionPtr mine = Share(Sum("x")), other = Share(Sum("x"));
      ranks[0].Submit(mine);
      ranks[1].Submit(other);
      ranks.seen.clear();
      ranks.Round();
      CHECK(ranks.seen[0].second[0].fused[0].by_rank[0] == mine);
      CHECK(ranks.seen[1].second[0].fused[0].by_rank[1] == other);
      CHECK(ranks.seen[1].second[0].fused[0].by_rank[0] != mine);
    }
    CHECK_EQ(ranks[0].hits(), capacity ? 2u : 0u);
  }
}

TEST(NegotiationNamesWhatDiffers) {
  const std::string mark = "RINGJAX[world, epoch 0]: ";
  const Submission grad = Sum("grad", {17, 2});
  auto other = [&](const std::function<void(Submission*)>& change) {
    Submission s = grad;
    change(&s);
    return DecisionOf(grad, s);
  };
  CHECK_EQ(other([](Submission*) {}), "run");
  CHECK_EQ(other([](Submission* s) { s->tensors[0].dims = {17, 3}; }),
           mark +
               "Mismatched shapes of allreduce 'grad': rank 0 sent f32[17,2], rank "
               "1 sent f32[17,3]");
  CHECK_EQ(other([](Submission* s) { s->tensors[0].dims = {34}; }),
           mark +
               "Mismatched shapes of allreduce 'grad': rank 0 sent f32[17,2], rank "
               "1 sent f32[34]");
  CHECK_EQ(other([](Submission* s) { s->tensors[0].dtype = DType::kF64; }),
           mark +
               "Mismatched dtypes of allreduce 'grad': rank 0 sent f32, rank 1 sent "
               "f64");
  CHECK_EQ(other([](Submission* s) { s->tensors.push_back(s->tensors[0]); }),
           mark +
               "Mismatched numbers of tensors of allreduce 'grad': rank 0 sent 1 "
               "tensor, rank 1 sent 2 tensors");
  CHECK_EQ(other([](Submission* s) { s->reduce_op = ReduceOp::kMax; }),
           mark +
               "Mismatched reduce ops of allreduce 'grad': rank 0 sent op=SUM, rank "
               "1 sent op=MAX");
  CHECK_EQ(other([](Submission* s) { s->postscale = 0.5; }),
           mark +
               "Mismatched factors of allreduce 'grad': rank 0 sent "
               "prescale_factor=1 postscale_factor=1, rank 1 sent "
               "prescale_factor=1 postscale_factor=0.5");
  CHECK_EQ(other([](Submission* s) { s->cuda = true; }),
           mark +
               "Mismatched devices of allreduce 'grad': rank 0 sent host tensors, "
               "rank 1 sent CUDA tensors");
  CHECK_EQ(other([](Submission* s) { s->alone = true; }), "run");
}

TEST(NegotiationNamesWhatDiffersInRowsAndRoots) {
  Submission rows = Named(Collective::kAllgather, "g", {3, 5}), more = rows;
  more.tensors[0].dims = {0, 5};
  CHECK_EQ(DecisionOf(rows, more), "run");
  more.tensors[0].dims = {3, 6};
  CHECK_EQ(DecisionOf(rows, more),
           "RINGJAX[world, epoch 0]: Mismatched shapes of allgather 'g': rank 0 sent "
           "f32[*,5], rank 1 sent f32[*,6]");
  Submission root = Named(Collective::kBroadcast, "w", {2}), second = root;
  second.root = 1;
  CHECK_EQ(DecisionOf(root, second),
           "RINGJAX[world, epoch 0]: Mismatched root ranks of broadcast 'w': rank 0 "
           "sent root_rank=0, rank 1 sent root_rank=1");
  // Arguments that have no meaning for an allgather may differ.
  rows.root = 1, rows.reduce_op = ReduceOp::kMin, rows.prescale = 3;
  more.tensors[0].dims = {1, 5};
  CHECK_EQ(DecisionOf(rows, more), "run");
}

TEST(NegotiationNamesTheOddOneOutByWorldRank) {
  NegotiationOptions options;
  options.members = {1, 2, 3, 5, 8, 9};
  NegotiatingRanks ranks(6, options);
  for (int r = 0; r < 6; ++r) {
    Submission s = Sum("x", {r == 1 ? 5 : 4});
    s.tensors.push_back({DType::kF32, {r == 4 ? 1 : 2}});
    ranks[r].Submit(Share(s));
  }
  const Decision d = ranks.Round()[0];
  CHECK_EQ(d.status.message(),
           "Mismatched shapes of allreduce 'x', tensor 0: ranks 1, 3, 5, 8, 9 sent "
           "f32[4], rank 2 sent f32[5]");
  CHECK_EQ(d.status.rank(), 2);
  CHECK_EQ(RankList({0, 1, 2, 4, 5}, options.members), "ranks 1-3, 8, 9");
  CHECK_EQ(RankList({3}, options.members), "rank 5");
}

TEST(NegotiationSurvivesAMismatch) {
  NegotiatingRanks ranks(2, {.fusion_threshold = 0});
  for (int step = 0; step < 3; ++step) {
    ranks.SubmitAll(Sum("before"));
    ranks[0].Submit(Share(Sum("x", {1})));
    ranks[1].Submit(Share(Sum("x", {2})));
    ranks.SubmitAll(Sum("after"));
    CHECK_EQ(Runs(ranks.Round()), "before | fail x | after");
    ranks.SubmitAll(Sum("x", {step}));
    CHECK_EQ(Runs(ranks.Round()), "x");
  }
}

TEST(NegotiationFusesWithLookAhead) {
  NegotiatingRanks ranks(2, {.fusion_threshold = 100});
  auto bytes = [&](const char* name, int64_t n, auto change) {
    Submission s = Named(Collective::kAllreduce, name, {n}, DType::kU8);
    change(&s);
    ranks.SubmitAll(s);
  };
  auto same = [](Submission*) {};
  bytes("a", 60, same);
  bytes("b", 60, same);
  bytes("max", 1, [](Submission* s) { s->reduce_op = ReduceOp::kMax; });
  bytes("c", 40, same);
  bytes("big", 101, same);
  bytes("alone", 1, [](Submission* s) { s->alone = true; });
  bytes("d", 41, same);
  bytes("cuda", 1, [](Submission* s) { s->cuda = true; });
  bytes("half", 1, [](Submission* s) { s->prescale = 0.5; });
  bytes("e", 40, same);
  bytes("double", 1, [](Submission* s) { s->tensors[0] = {DType::kF64, {}}; });
  CHECK_EQ(Runs(ranks.Round()),
           "a c | b e | max | big | alone | d double | cuda | half");
}

TEST(NegotiationFusesEachKindItsOwnWay) {
  NegotiatingRanks ranks(2, {.fusion_threshold = 100});
  auto all = [&](Collective op, const char* name, std::vector<int64_t> dims, int root) {
    Submission s = Named(op, name, std::move(dims), DType::kU8);
    s.root = root;
    ranks.SubmitAll(s);
  };
  all(Collective::kBroadcast, "b0", {9}, 0);
  all(Collective::kBroadcast, "b1", {9}, 1);
  all(Collective::kAllgather, "g", {30}, 0);  // 60 bytes on two ranks
  all(Collective::kAllgather, "h", {21}, 0);  // 42
  all(Collective::kAllgather, "i", {20}, 0);  // 40
  all(Collective::kReducescatter, "r", {50}, 0);
  all(Collective::kAlltoall, "t", {2}, 0);
  all(Collective::kAlltoall, "u", {2}, 0);
  all(Collective::kBarrier, "v", {}, 0);
  all(Collective::kBarrier, "w", {}, 0);
  all(Collective::kReducescatter, "s", {50}, 0);
  all(Collective::kBroadcast, "b2", {9}, 1);
  CHECK_EQ(Runs(ranks.Round()), "b0 | b1 b2 | g i | h | r s | t | u | v | w");
}

TEST(NegotiationCountsAJoinedRankAsReady) {
  NegotiatingRanks ranks(3);
  ranks[0].Submit(Share(Sum("x")));
  ranks[0].Submit(Share(Named(Collective::kBroadcast, "w", {2})));
  Submission from_two = Named(Collective::kBroadcast, "v", {2});
  from_two.root = 2;
  ranks[0].Submit(Share(from_two));
  ranks[1].Submit(Share(Sum("x")));
  CHECK_EQ(Runs(ranks.Round()), "");
  ranks[2].Join();
  const auto decisions = ranks.Round();
  CHECK_EQ(Runs(decisions), "x");
  CHECK(decisions[0].fused[0].by_rank[0] && decisions[0].fused[0].by_rank[1]);
  CHECK(!decisions[0].fused[0].by_rank[2]);
  ranks[1].Submit(Share(from_two));
  ranks[1].Submit(Share(Named(Collective::kBroadcast, "w", {2})));
  const auto rooted = ranks.Round();
  CHECK_EQ(Runs(rooted), "fail v | w");
  CHECK_EQ(rooted[0].status.message(), "root rank 2 of broadcast 'v' has joined");
  CHECK_EQ(rooted[0].status.rank(), 2);
}

TEST(NegotiationEndsAJoinWhenAllHaveJoined) {
  NegotiatingRanks ranks(3);
  for (int turn = 0; turn < 2; ++turn) {
    ranks[1].Join();
    ranks[0].Submit(Share(Sum("x")));
    CHECK_EQ(Runs(ranks.Round()), "");
    ranks[2].Join();
    CHECK_EQ(Runs(ranks.Round()), "x");
    ranks[0].Submit(Share(Sum("y")));
    ranks[0].Join();
    CHECK_EQ(Runs(ranks.Round()), "y | joined 0");
    ranks[0].Submit(Share(Sum("z")));
    ranks[1].Submit(Share(Sum("z")));
    CHECK_EQ(Runs(ranks.Round()), "");
    ranks[2].Submit(Share(Sum("z")));
    CHECK_EQ(Runs(ranks.Round()), "z");
  }
}

TEST(NegotiationLetsAJoinedRankSubmit) {
  NegotiatingRanks ranks(2);
  ranks[0].Join();
  ranks.Round();
  ranks[0].Submit(Share(Sum("x")));
  CHECK_EQ(Runs(ranks.Round()), "");
  CHECK_EQ(RankList(ranks[1].waiting()[0].missing, {0, 1}), "rank 1");
  ranks[1].Submit(Share(Sum("x")));
  const auto decisions = ranks.Round();
  CHECK_EQ(Runs(decisions), "x");
  CHECK(decisions[0].fused[0].by_rank[0] != nullptr);
  // Operations that are submitted after a join wait until the join has ended.
  ranks[0].Submit(Share(Sum("y")));
  ranks[1].Join();
  CHECK_EQ(Runs(ranks.Round()), "y | joined 1");
}

TEST(NegotiationExpiresOnAllWaitingRanks) {
  NegotiationOptions options{.members = {3, 4, 5}, .prefix = "P: "};
  NegotiatingRanks ranks(3, options);
  ranks[0].Submit(Share(Sum("x")));
  ranks[2].Submit(Share(Sum("x")));
  ranks[1].Submit(Share(Named(Collective::kAllgather, "x", {4})));
  ranks.Round();
  const auto waiting = ranks[1].waiting();
  CHECK_EQ(waiting.size(), 2u);
  CHECK_EQ(MissingText(waiting[0], options.members, 60),
           "rank 4 has not submitted allreduce 'x' (f32[4], SUM) for 60 s; rank 4 has "
           "submitted allgather 'x'");
  CHECK_EQ(MissingText(waiting[1], options.members, 1.5),
           "ranks 3, 5 have not submitted allgather 'x' (f32[*]) for 1.5 s; ranks 3, 5 "
           "have submitted allreduce 'x'");
  CHECK(waiting[0].id < waiting[1].id && waiting[1].id < ranks[1].next_id());
  ranks[0].Expire(Collective::kAllreduce, "x", 300);
  ranks[2].Expire(Collective::kAllreduce, "x", 300);
  const auto decisions = ranks.Round();
  CHECK_EQ(Runs(decisions), "fail x");
  CHECK(decisions[0].status.code() == Code::kDeadlineExceeded);
  CHECK_EQ(decisions[0].status.rank(), 4);
  CHECK_EQ(decisions[0].status.message(),
           "P: rank 4 has not submitted allreduce 'x' (f32[4], SUM) for 300 s; rank 4 "
           "has submitted allgather 'x'");
  CHECK(!decisions[0].fused[0].by_rank[1] && decisions[0].fused[0].by_rank[2]);
  ranks.SubmitAll(Sum("x"));
  CHECK_EQ(Runs(ranks.Round()), "x");
}

TEST(NegotiationRunsAnOperationThatIsReadyAsItExpires) {
  NegotiatingRanks ranks(2);
  ranks[0].Submit(Share(Sum("x")));
  ranks.Round();
  ranks[0].Expire(Collective::kAllreduce, "x", 1);
  ranks[1].Submit(Share(Sum("x")));
  CHECK_EQ(Runs(ranks.Round()), "x");
  // An expiry applies only to an operation that was pending on its rank at that time.
  ranks[0].Expire(Collective::kAllreduce, "x", 1);
  ranks[0].Submit(Share(Sum("x")));
  ranks[1].Expire(Collective::kAllreduce, "x", 1);
  CHECK_EQ(Runs(ranks.Round()), "");
  CHECK_EQ(ranks[1].pending(), 1u);
}

TEST(NegotiationExpiresNoLaterOperationOfTheName) {
  NegotiatingRanks ranks(3);
  ranks[0].Submit(Share(Sum("x")));
  ranks[2].Join();
  ranks.Round();
  ranks[0].Expire(Collective::kAllreduce, "x", 1);
  ranks[1].Submit(Share(Sum("x")));
  ranks[2].Submit(Share(Sum("x")));  // until the others submit the name again
  CHECK_EQ(Runs(ranks.Round()), "x");
  CHECK_EQ(ranks[0].waiting().size(), 1u);
  ranks[0].Submit(Share(Sum("x")));
  ranks[1].Submit(Share(Sum("x")));
  CHECK_EQ(Runs(ranks.Round()), "x");
}

TEST(NegotiationRefusesExactlyTheImpossibleSubmissions) {
  auto why = [](const Submission& s) { return CheckSubmission(s, 2).message(); };
  CHECK_EQ(why(Sum("x")), "");
  CHECK_EQ(why(Sum("x", {-1})), "f32[-1] is beyond any memory");
  CHECK_EQ(why(Sum("x", {0, 1 << 30, 1 << 30})),
           "f32[0,1073741824,1073741824] is beyond any memory");
  CHECK_EQ(why(Named(Collective::kAllgather, "x", {})),
           "a tensor without dimensions has no rows");
  Submission all = Named(Collective::kAlltoall, "x", {3, 2});
  CHECK_EQ(why(all), "dim 0 of f32[3,2] is not a multiple of 2 ranks; pass splits");
  all.splits = {1, 2};
  CHECK_EQ(why(all), "");
  all.splits = {1, 1};
  CHECK_EQ(why(all), "splits do not sum to the rows of f32[3,2]");
  all.splits = {INT64_MAX, INT64_MAX};
  CHECK_EQ(why(all), "splits do not sum to the rows of f32[3,2]");
  all.splits = {4, -1};
  CHECK(!why(all).empty());
  all.splits = {3};
  CHECK_EQ(why(all), "1 splits for 1 tensors and 2 ranks");
  auto reduced = [&](Collective op, ReduceOp reduce_op, DType dtype) {
    Submission s = Named(op, "x", {4}, dtype);
    s.reduce_op = reduce_op;
    return why(s);
  };
  constexpr auto kAll = Collective::kAllreduce, kParts = Collective::kReducescatter;
  CHECK_EQ(reduced(kAll, ReduceOp::kAdasum, DType::kF16), "");
  CHECK_EQ(reduced(kAll, ReduceOp::kAdasum, DType::kI8),
           "op=ADASUM is for tensors of f16, bf16, f32 or f64, not i8");
  CHECK_EQ(reduced(kParts, ReduceOp::kAdasum, DType::kF16),
           "op=ADASUM is for allreduce only");
  CHECK_EQ(reduced(kAll, ReduceOp::kMin, DType::kC64),
           "op=MIN has no order on complex numbers");
  CHECK_EQ(reduced(kAll, ReduceOp::kAverage, DType::kBool),
           "op=AVERAGE has no meaning for bool");
  Submission root = Named(Collective::kBroadcast, "x", {3});
  root.root = 2;
  CHECK_EQ(why(root), "root rank 2 is not in 0..1");
  Submission none = Sum("x");
  none.tensors.clear();
  CHECK_EQ(why(none), "there are no tensors");
}

}  // namespace
}  // namespace ringjax
