// Negotiation under random programs. Ranks submit equal sets of named operations, each
// rank in its own order and at its own pace, some with a planted difference, and join
// at the end. In every interleaving, all ranks make the same decisions, every
// submission ends exactly once and correctly, and nothing is left over. The two
// shortcuts that lanes take after a decision (no call, no agreement) are taken by all
// ranks or none, and only where they are right.
#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <tuple>

#include "engine/eager/negotiation.h"
#include "negotiation_ranks.h"

namespace ringjax {
namespace {

using Random = std::mt19937_64;

size_t Below(Random& random, size_t n) { return static_cast<size_t>(random() % n); }
bool Chance(Random& random, size_t one_in) { return Below(random, one_in) == 0; }

// One operation of a program, as every rank will submit it.
struct Operation {
  std::vector<Submission> by_rank;
  bool alike = true;
};

// Changes one property that must be equal on all ranks.
void Plant(Submission* s, int size, Random& random) {
  std::vector<int> ways = {0};
  if (s->op == Collective::kBroadcast) ways.insert(ways.end(), {6, 6, 6});
  if (!s->tensors.empty()) ways.insert(ways.end(), {1, 2, 3});
  if (s->Reduces()) ways.insert(ways.end(), {4, 5});
  switch (ways[Below(random, ways.size())]) {
    case 0:
      s->cuda = !s->cuda;
      break;
    case 1:
      s->tensors[0].dtype =
          s->tensors[0].dtype == DType::kF64 ? DType::kI64 : DType::kF64;
      break;
    case 2:
      s->tensors.back().dims.push_back(2);
      break;
    case 3:
      s->tensors.push_back(s->tensors[0]);
      if (!s->splits.empty())
        s->splits.insert(
            s->splits.end(), s->splits.begin(),
            s->splits.begin() + static_cast<long>(s->splits.size()) /
                                    static_cast<long>(s->tensors.size() - 1));
      break;
    case 4:
      s->reduce_op =
          s->reduce_op == ReduceOp::kSum ? ReduceOp::kProduct : ReduceOp::kSum;
      break;
    case 5:
      s->postscale += 1;
      break;
    default:
      s->root = (s->root + 1) % size;
  }
}

Submission RandomSubmission(std::string name, int size, Random& random) {
  constexpr Collective kOps[] = {Collective::kAllreduce,     Collective::kAllreduce,
                                 Collective::kAllgather,     Collective::kBroadcast,
                                 Collective::kReducescatter, Collective::kAlltoall,
                                 Collective::kBarrier};
  Submission s;
  s.op = kOps[Below(random, std::size(kOps))];
  s.name = std::move(name);
  s.alone = Chance(random, 8);
  s.cuda = Chance(random, 5);
  if (s.Reduces() && Chance(random, 3)) s.reduce_op = ReduceOp::kProduct;
  if (s.Reduces() && Chance(random, 4)) s.prescale = 0.5;
  if (s.op == Collective::kBroadcast)
    s.root = static_cast<int>(Below(random, static_cast<size_t>(size)));
  if (s.op == Collective::kBarrier) return s;
  const size_t tensors = Chance(random, 4) ? 1 + Below(random, 4) : 1;
  for (size_t i = 0; i < tensors; ++i) {
    Submission::Piece& piece = s.tensors.emplace_back();
    piece.dtype = static_cast<DType>(Below(random, kDTypeCount));
    piece.dims = {static_cast<int64_t>(size) * static_cast<int64_t>(Below(random, 4))};
    for (size_t d = Below(random, 3); d > 0; --d)
      piece.dims.push_back(static_cast<int64_t>(Below(random, 5)));
  }
  return s;
}

// Changes row counts, which may differ between ranks.
void VaryRows(Submission* s, int size, Random& random) {
  if (s->op != Collective::kAllgather && s->op != Collective::kAlltoall) return;
  const bool splits = s->op == Collective::kAlltoall && Chance(random, 2);
  for (Submission::Piece& piece : s->tensors) {
    piece.dims[0] = size * static_cast<int64_t>(Below(random, 3));
    if (!splits) continue;
    piece.dims[0] = 0;
    for (int r = 0; r < size; ++r) {
      s->splits.push_back(static_cast<int64_t>(Below(random, 3)));
      piece.dims[0] += s->splits.back();
    }
  }
}

Operation RandomOperation(const std::string& name, int size, Random& random) {
  Operation operation;
  const Submission base = RandomSubmission(name, size, random);
  operation.by_rank.assign(static_cast<size_t>(size), base);
  const bool rows_differ = Chance(random, 2);
  for (Submission& s : operation.by_rank)
    if (rows_differ) VaryRows(&s, size, random);
  if (size > 1 && Chance(random, 6)) {
    Plant(&operation.by_rank[Below(random, static_cast<size_t>(size))], size, random);
    operation.alike = false;
  }
  const bool usual = !Chance(random, 3);  // whether all ranks have places
  for (Submission& s : operation.by_rank) s.placed = usual || Chance(random, 2);
  for (const Submission& s : operation.by_rank)
    CHECK_EQ(CheckSubmission(s, size).message(), "");
  return operation;
}

uint64_t FusedBytes(const Decision& decision) {
  uint64_t bytes = 0;
  for (const Ready& ready : decision.fused) {
    const bool gathers = ready.any->op == Collective::kAllgather;
    for (const SubmissionPtr& s : EachOf(ready))
      for (const auto& piece : s&& gathers ? s->tensors : decltype(s->tensors)())
        bytes += piece.bytes();
    for (const auto& piece :
         gathers ? decltype(ready.any->tensors)() : ready.any->tensors)
      bytes += piece.bytes();
  }
  return bytes;
}

void CheckFusion(const Decision& decision, uint64_t threshold) {
  CHECK(!decision.fused.empty());
  if (decision.fused.size() < 2) return;
  CHECK(FusedBytes(decision) <= threshold);
  const Submission& first = *decision.fused[0].any;
  CHECK(first.op != Collective::kAlltoall && first.op != Collective::kBarrier);
  for (const Ready& ready : decision.fused) {
    const Submission& s = *ready.any;
    CHECK(std::tie(s.op, s.reduce_op, s.root, s.prescale, s.postscale, s.cuda) ==
          std::tie(first.op, first.reduce_op, first.root, first.prescale,
                   first.postscale, first.cuda));
    for (const SubmissionPtr& one : EachOf(ready)) CHECK(!one || !one->alone);
  }
}

class Simulation {
 public:
  explicit Simulation(uint64_t seed) : random_(seed), ranks_(RandomRanks()) {
    const size_t names = 1 + Below(random_, 12);
    const bool repeats = Chance(random_, 2);
    const size_t steps = 1 + Below(random_, 5);
    for (size_t step = 0; step < steps; ++step) {
      auto& operations = program_.emplace_back();
      for (size_t i = 0; i < names; ++i) {
        const std::string name = "op" + std::to_string(i);
        operations.push_back(repeats && step > 0
                                 ? program_[0][i]
                                 : RandomOperation(name, ranks_.size(), random_));
      }
    }
  }

  inline static size_t shortcuts = 0;  // rounds in which all ranks took a shortcut

  // Runs two phases, so that remains of the first join would show.
  void Run() {
    for (int phase = 0; phase < 2; ++phase) {
      Begin();
      for (size_t idle = 0; idle < 200 && !Done(); ++idle) {
        for (int r = 0; r < ranks_.size(); ++r) Move(r);
        if (Chance(random_, 2)) continue;  // more may gather for the next round
        const Shortcut lone = Ask();
        const auto messages = ranks_.Take();
        for (int r = 0; r < ranks_.size(); ++r)
          if (Chance(random_, 4)) Move(r);  // while the messages travel
        ranks_.seen.clear();
        CheckShortcut(lone, ranks_.Give(messages));
        for (const auto& [r, decisions] : ranks_.seen) {
          if (!decisions.empty()) idle = 0;
          for (const Decision& decision : decisions) Obey(r, decision);
        }
      }
      CHECK(Done());
      for (int r = 0; r < ranks_.size(); ++r) {
        CHECK_EQ(ranks_[r].pending(), 0u);
        CHECK(ranks_[r].waiting().empty());
        CHECK(!ranks_[r].HasItems());
      }
    }
  }

 private:
  struct Rank {
    size_t steps = 0, step = 0;  // number of steps; the current step
    std::vector<size_t> order;   // operations of the step that are not submitted yet
    std::map<std::pair<Collective, std::string>, SubmissionPtr> under_way;
    bool joining = false, done = false;
  };

  NegotiatingRanks RandomRanks() {
    NegotiationOptions options;
    const size_t size = 1 + Below(random_, 5);
    for (size_t r = 0; r < size; ++r)
      options.members.push_back(static_cast<int>(3 * r));
    constexpr size_t kCapacities[] = {0, 1, 3, 1000};
    constexpr uint64_t kThresholds[] = {0, 64, 1000, uint64_t{1} << 27};
    options.cache_capacity = kCapacities[Below(random_, 4)];
    options.fusion_threshold = threshold_ = kThresholds[Below(random_, 4)];
    return NegotiatingRanks(static_cast<int>(size), options);
  }

  void Begin() {
    state_.assign(static_cast<size_t>(ranks_.size()), Rank());
    const bool uneven = Chance(random_, 2);
    for (Rank& rank : state_) {
      rank.steps = uneven ? Below(random_, program_.size() + 1) : program_.size();
      Refill(&rank);
    }
  }

  void Refill(Rank* rank) {
    rank->order.clear();
    if (rank->step == rank->steps) return;
    for (size_t i = 0; i < program_[rank->step].size(); ++i) rank->order.push_back(i);
    std::shuffle(rank->order.begin(), rank->order.end(), random_);
  }

  // Submits some of the remaining operations of the rank; joins after the last step.
  void Move(int r) {
    Rank& rank = state_[static_cast<size_t>(r)];
    for (size_t n = Below(random_, 6); n > 0 && !rank.joining; --n) {
      if (rank.step == rank.steps) {
        ranks_[r].Join();
        rank.joining = true;
        return;
      }
      const Operation& operation = program_[rank.step][rank.order.back()];
      const Submission& s = operation.by_rank[static_cast<size_t>(r)];
      if (rank.under_way.count({s.op, s.name}) > 0) return;  // from an earlier step
      const SubmissionPtr mine = Share(s);
      rank.under_way[{s.op, s.name}] = mine;
      began_[mine.get()] = rank.step;
      ranks_[r].Submit(mine);
      rank.order.pop_back();
      if (!rank.order.empty()) continue;
      ++rank.step;
      Refill(&rank);
    }
  }

  void Obey(int r, const Decision& decision) {
    Rank& rank = state_[static_cast<size_t>(r)];
    if (decision.kind == Decision::Kind::kJoined) {
      CHECK(rank.joining && !rank.done && rank.under_way.empty());
      CHECK(decision.last_joined >= 0 && decision.last_joined < ranks_.size());
      rank.done = true;
      return;
    }
    if (decision.kind == Decision::Kind::kRun) CheckFusion(decision, threshold_);
    for (const Ready& ready : decision.fused) Finish(r, ready, decision);
  }

  void Finish(int r, const Ready& ready, const Decision& decision) {
    const SubmissionPtr& mine = ready.by_rank[static_cast<size_t>(r)];
    Rank& rank = state_[static_cast<size_t>(r)];
    if (!mine) {
      CHECK(rank.joining);
      return;
    }
    const auto waiting = rank.under_way.find({mine->op, mine->name});
    CHECK(waiting != rank.under_way.end() && waiting->second == mine);
    if (waiting == rank.under_way.end()) return;
    rank.under_way.erase(waiting);
    CheckDecision(began_[mine.get()], *mine, ready, decision);
    began_.erase(mine.get());
  }

  // By rank: the submission that the rank would piggyback, and the id that the next new
  // operation gets.
  struct Shortcut {
    std::vector<const Submission*> lone;
    std::vector<uint64_t> first_ids;
  };

  Shortcut Ask() {
    Shortcut shortcut;
    for (int r = 0; r < ranks_.size(); ++r) {
      shortcut.lone.push_back(ranks_[r].OnlySubmission());
      shortcut.first_ids.push_back(ranks_[r].next_id());
    }
    return shortcut;
  }

  // If all ranks have sent values and would use them for the decision, the values of
  // each rank must belong to the submission that was decided.
  void CheckShortcut(const Shortcut& shortcut, const std::vector<Decision>& decided) {
    for (uint64_t first_id : shortcut.first_ids)
      CHECK_EQ(first_id, shortcut.first_ids[0]);  // so all ranks judge equally
    const bool whole = std::all_of(shortcut.lone.begin(), shortcut.lone.end(),
                                   [](const Submission* s) { return s != nullptr; });
    if (!whole || !RunOneNew(decided, shortcut.first_ids[0])) return;
    ++shortcuts;
    for (size_t r = 0; r < shortcut.lone.size(); ++r) {
      const SubmissionPtr& s = decided[0].fused[0].by_rank[r];
      CHECK(s && s->Same(*shortcut.lone[r]));
    }
  }

  // Exactly the ranks that make this step take part. The agreement is skipped if and
  // only if every rank of the job has placed the operation.
  void CheckDecision(size_t step, const Submission& mine, const Ready& ready,
                     const Decision& decision) {
    const auto& operations = program_[step];
    const auto operation = std::find_if(
        operations.begin(), operations.end(),
        [&](const Operation& o) { return o.by_rank[0].name == mine.name; });
    std::set<std::string> forms;
    bool all_placed = true;
    for (int r = 0; r < ranks_.size(); ++r) {
      const auto i = static_cast<size_t>(r);
      CHECK_EQ(ready.by_rank[i] != nullptr, step < state_[i].steps);
      if (!ready.by_rank[i]) {
        all_placed = false;
        continue;
      }
      CHECK(ready.by_rank[i]->Same(operation->by_rank[i]));
      all_placed = all_placed && operation->by_rank[i].placed;
      forms.insert(Form(operation->by_rank[i]));
    }
    if (decision.fused.size() == 1) CHECK_EQ(decision.IsPlaced(), all_placed);
    CHECK(!decision.IsPlaced() || all_placed);
    const bool no_root = mine.op == Collective::kBroadcast &&
                         !ready.by_rank[static_cast<size_t>(mine.root)];
    CHECK(forms.size() == 1 || !operation->alike);
    CHECK_EQ(decision.kind == Decision::Kind::kRun, forms.size() == 1 && !no_root);
    if (decision.kind == Decision::Kind::kFail)
      CHECK(decision.status.code() == Code::kMismatch && decision.fused.size() == 1);
  }

  // Returns an independent list of the properties that must be equal.
  static std::string Form(const Submission& s) {
    std::string form = s.cuda ? "cuda" : "host";
    for (const auto& piece : s.tensors)
      form += " " + Describe(piece, s.op == Collective::kAllgather ||
                                        s.op == Collective::kAlltoall);
    if (s.op == Collective::kBroadcast) form += " " + std::to_string(s.root);
    if (s.Reduces())
      form += std::string(Name(s.reduce_op)) + std::to_string(s.prescale) + " " +
              std::to_string(s.postscale);
    return form;
  }

  bool Done() const {
    return std::all_of(state_.begin(), state_.end(),
                       [](const Rank& rank) { return rank.done; });
  }

  Random random_;
  uint64_t threshold_ = 0;
  NegotiatingRanks ranks_;
  std::vector<std::vector<Operation>> program_;  // steps of operations
  std::vector<Rank> state_;
  std::map<const Submission*, size_t> began_;  // the step of each pending submission
};

TEST(NegotiationOfRandomPrograms) {
  Simulation::shortcuts = 0;
  for (uint64_t seed = 0; seed < 1000; ++seed) {
    const int before = testing::failures;
    Simulation(seed).Run();
    if (testing::failures > before) {
      testing::Fail(__FILE__, __LINE__, "seed " + std::to_string(seed));
      return;
    }
  }
  CHECK(Simulation::shortcuts > 100);
}

// Some ranks never submit some names. Exactly these names wait, expire, and can be used
// again.
TEST(NegotiationOfRandomAbsences) {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    Random random(seed);
    const int size = 2 + static_cast<int>(Below(random, 4));
    NegotiatingRanks ranks(size, {.cache_capacity = Below(random, 5)});
    std::map<std::string, std::vector<int>> here;
    size_t ran = 0, complete = 0;
    for (int i = 0; i < 10; ++i) {
      const std::string name = std::to_string(i);
      for (int r = 0; r < size; ++r)
        if (Chance(random, 2)) here[name].push_back(r);
      for (int r : here[name]) ranks[r].Submit(Share(Sum(name)));
      if (here[name].empty() || here[name].size() == static_cast<size_t>(size)) {
        complete += !here[name].empty();
        here.erase(name);
      }
      if (Chance(random, 2))
        for (const Decision& d : ranks.Round()) ran += d.fused.size();
    }
    for (const Decision& d : ranks.Round()) ran += d.fused.size();
    CHECK_EQ(ran, complete);
    for (int r = 0; r < size; ++r) {
      CHECK_EQ(ranks[r].waiting().size(), here.size());
      for (const auto& waiting : ranks[r].waiting()) {
        CHECK(waiting.submitted == here[waiting.any->name]);
        CHECK_EQ(waiting.missing.size() + waiting.submitted.size(),
                 static_cast<size_t>(size));
      }
    }
    for (const auto& [name, who] : here)
      ranks[who[Below(random, who.size())]].Expire(Collective::kAllreduce, name, 9);
    for (const Decision& d : ranks.Round()) {
      CHECK(d.kind == Decision::Kind::kFail);
      CHECK(d.status.code() == Code::kDeadlineExceeded);
      for (int r = 0; r < size; ++r) {
        const auto& who = here[d.fused[0].any->name];
        CHECK_EQ(d.fused[0].by_rank[static_cast<size_t>(r)] != nullptr,
                 std::count(who.begin(), who.end(), r) == 1);
      }
    }
    for (int i = 0; i < 10; ++i) ranks.SubmitAll(Sum(std::to_string(i)));
    size_t again = 0;
    for (const Decision& d : ranks.Round()) again += d.fused.size();
    CHECK_EQ(again, 10u);
    CHECK_EQ(ranks[0].pending(), 0u);
  }
}

}  // namespace
}  // namespace ringjax
