// The verifier: runs the schedules of all ranks together, with sets of contributing
// ranks in place of numbers, and proves the properties that the executor relies on.
//
// Two steps of a rank conflict if their ranges overlap and one of the two writes. A
// step can run when all earlier steps of its rank have run that conflict with it or
// that use the same direction of the same link. A message moves when both of its ends
// can run, as if links had no buffers. Conflicting steps are always ordered, so every
// order of execution gives the same values, and trying one order proves all. Memory is
// a list of intervals that begin and end where messages do, so a long vector costs no
// more than a short one. Each element of a reduction must be finished (scaled, rounded
// to the wire dtype) on one rank and then be copied, so that all ranks end with the
// same bits.
//
// The verifier proves nothing about the executor or about arithmetic. It runs allreduce
// and broadcast twice, the second time with kIn and kOut in the same memory.
#include <algorithm>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "collective/symbolic.h"
#include "collective/table.h"

namespace ringjax {
namespace {

using namespace symbolic;  // NOLINT: only this file uses the namespace

constexpr size_t kRegions = 3;
constexpr const char* kRegionNames[kRegions] = {"in", "out", "scratch"};
constexpr const char* kKindNames[] = {"send to", "recv from", "recv-reduce from",
                                      "copy"};

Status Bad(std::string what) { return {Code::kInternal, std::move(what)}; }

std::string Text(const Slice& slice) {
  return std::string(kRegionNames[static_cast<size_t>(slice.region)]) + "[" +
         std::to_string(slice.offset) + " +" + std::to_string(slice.count) + "]";
}

// The promise of a collective to one rank: the sizes of its kIn and kOut in elements,
// and the contents that kOut must have at the end.
struct Promise {
  struct Part {
    uint64_t count;
    int source;         // the rank of the elements; -1 if reduced over all ranks
    uint64_t position;  // offset of the first element in the kIn of the source
  };
  uint64_t in = 0, out = 0;
  std::vector<Part> parts;  // contents of kOut, in order
};

uint64_t Sum(const std::vector<uint64_t>& counts, size_t begin, size_t end) {
  uint64_t sum = 0;
  for (size_t i = begin; i < end; ++i) sum += counts[i];
  return sum;
}

Promise PromiseTo(int rank, const std::vector<Problem>& problems) {
  const auto r = static_cast<size_t>(rank), size = problems.size();
  const Problem& problem = problems[r];
  const std::vector<uint64_t>& counts = problem.counts;
  switch (problem.op) {
    case Collective::kAllreduce:
      return {counts[0], counts[0], {{counts[0], -1, 0}}};
    case Collective::kBroadcast:
      return {counts[0], counts[0], {{counts[0], problem.root, 0}}};
    case Collective::kReducescatter:
      return {Sum(counts, 0, size), counts[r], {{counts[r], -1, Sum(counts, 0, r)}}};
    case Collective::kAllgather: {
      Promise promise{counts[r], Sum(counts, 0, size), {}};
      for (size_t s = 0; s < size; ++s)
        promise.parts.push_back({counts[s], static_cast<int>(s), 0});
      return promise;
    }
    case Collective::kAlltoall: {
      Promise promise{Sum(counts, 0, size), Sum(counts, size, 2 * size), {}};
      for (size_t s = 0; s < size; ++s)
        promise.parts.push_back(
            {counts[size + s], static_cast<int>(s), Sum(problems[s].counts, 0, r)});
      return promise;
    }
    case Collective::kBarrier:
    case Collective::kExchange:
      break;
  }
  return {};
}

// Returns whether the results are reductions over all ranks, and not copies.
bool Reduces(Collective op) {
  return op == Collective::kAllreduce || op == Collective::kReducescatter;
}

// Returns kInvalidArgument unless the problems of all ranks belong to one collective.
Status CheckAgreement(const std::vector<Problem>& problems) {
  const auto size = problems.size();
  for (const Problem& problem : problems) {
    RJ_TRY(CheckProblem(problem, static_cast<int>(size)));
    const Problem& other = problems[0];
    const bool same = problem.op == other.op && problem.root == other.root &&
                      problem.even == other.even &&
                      ((problem.op == Collective::kAlltoall && !problem.even) ||
                       problem.counts == other.counts);
    if (!same) return {Code::kInvalidArgument, "the ranks' problems disagree"};
  }
  if (size == 0 || problems[0].op != Collective::kAlltoall) return {};
  for (size_t i = 0; i < size; ++i) {
    for (size_t j = 0; j < size; ++j)
      if (problems[i].counts[j] != problems[j].counts[size + i])
        return {Code::kInvalidArgument, "rank " + std::to_string(i) +
                                            " does not send to rank " +
                                            std::to_string(j) + " what that expects"};
  }
  return {};
}

// One run of the schedules of all ranks. Errors name the rank and the step.
class Run {
 public:
  Run(const std::vector<Problem>& problems, const std::vector<Schedule>& schedules,
      bool aliased);
  Status Execute(Report* report);

 private:
  // A step, and its dependencies on other steps of its rank.
  struct Node {
    const Step* step;
    size_t partner = 0;  // index of the message's other end in the steps of the peer
    int waits = 0;       // earlier steps of this rank that must run first and have not
    bool done = false;
    std::vector<size_t> next;  // later steps of this rank that wait for this one
  };
  struct Place {
    size_t rank, step;
  };

  Node& At(Place p) { return nodes_[p.rank][p.step]; }
  Place Partner(Place p) {
    return {static_cast<size_t>(At(p).step->peer), At(p).partner};
  }
  size_t Physical(Region region) const {
    return static_cast<size_t>(aliased_ && region == Region::kIn ? Region::kOut
                                                                 : region);
  }
  bool Overlap(const Slice& a, const Slice& b) const {
    return Physical(a.region) == Physical(b.region) && a.count > 0 && b.count > 0 &&
           a.offset < b.offset + b.count && b.offset < a.offset + a.count;
  }
  bool Conflict(const Step& a, const Step& b) const {
    return Overlap(a.dst, b.dst) || Overlap(a.dst, b.src) || Overlap(a.src, b.dst);
  }

  std::string Where(Place p);
  Status CheckStep(size_t rank, const Step& step) const;
  Status CheckSlice(size_t rank, const Slice& slice) const;
  Status Match();
  void Order(std::vector<Node>* nodes) const;
  Status RunAll(Report* report);
  Status RunOne(Place p, Report* report);
  void Complete(Place p, std::deque<Place>* ready);
  Result<Pieces> Take(Place p);
  Status Store(Place p, Pieces pieces);
  Status Deadlock();
  Status CheckResult(size_t rank);

  const std::vector<Problem>& problems_;
  const std::vector<Schedule>& schedules_;
  const bool aliased_;
  const int size_;
  Ranks all_;
  std::vector<Promise> promises_;
  std::vector<std::vector<Memory>> memory_;  // memory by rank and region
  Memory finished_;                          // a reduction's finished elements
  std::vector<std::vector<Node>> nodes_;
};

Run::Run(const std::vector<Problem>& problems, const std::vector<Schedule>& schedules,
         bool aliased)
    : problems_(problems),
      schedules_(schedules),
      aliased_(aliased),
      size_(static_cast<int>(problems.size())) {
  for (int r = 0; r < size_; ++r) {
    const Ranks self(r, size_);
    all_.Add(self);
    promises_.push_back(PromiseTo(r, problems));
    memory_.emplace_back(kRegions);
    const uint64_t n = promises_.back().in;
    if (n > 0)
      memory_.back()[Physical(Region::kIn)].Write(0, {{n, {self, 0, true, false, 0}}});
    nodes_.emplace_back();
    for (const Step& step : schedules[static_cast<size_t>(r)].steps)
      nodes_.back().push_back({&step, 0, 0, false, {}});
  }
}

Status Run::Execute(Report* report) {
  for (size_t r = 0; r < nodes_.size(); ++r) {
    for (size_t i = 0; i < nodes_[r].size(); ++i) {
      if (Status s = CheckStep(r, *nodes_[r][i].step); !s.ok())
        return Bad(Where({r, i}) + s.message());
    }
    Order(&nodes_[r]);
  }
  RJ_TRY(Match());
  RJ_TRY(RunAll(report));
  for (size_t r = 0; r < nodes_.size(); ++r) RJ_TRY(CheckResult(r));
  return {};
}

std::string Run::Where(Place p) {
  const Step& step = *At(p).step;
  std::string text = "rank " + std::to_string(p.rank) + ", step " +
                     std::to_string(p.step) + " (" +
                     kKindNames[static_cast<size_t>(step.kind)];
  if (step.kind != StepKind::kCopy) text += " " + std::to_string(step.peer);
  if (step.src.count > 0) text += ", src " + Text(step.src);
  if (step.dst.count > 0) text += ", dst " + Text(step.dst);
  return text + "): ";
}

Status Run::CheckSlice(size_t rank, const Slice& slice) const {
  const Promise& promise = promises_[rank];
  const uint64_t sizes[kRegions] = {promise.in, promise.out, schedules_[rank].scratch};
  const uint64_t size = sizes[static_cast<size_t>(slice.region)];
  if (slice.offset > size || slice.count > size - slice.offset)
    return Bad(Text(slice) + " is out of bounds, the size is " + std::to_string(size));
  return {};
}

Status Run::CheckStep(size_t rank, const Step& step) const {
  const StepKind kind = step.kind;
  const bool reads = kind != StepKind::kRecv, writes = kind != StepKind::kSend;
  const bool finishes = kind == StepKind::kCopy || kind == StepKind::kRecvReduce;
  if (reads != (step.src.count > 0) || writes != (step.dst.count > 0))
    return Bad("a slice is empty that must not be, or the reverse");
  if (reads && writes && step.src.count != step.dst.count)
    return Bad("src and dst have different sizes");
  RJ_TRY(CheckSlice(rank, step.src));
  RJ_TRY(CheckSlice(rank, step.dst));
  if (writes && step.dst.region == Region::kIn) return Bad("it writes to in");
  if (Overlap(step.src, step.dst) && step.src.offset != step.dst.offset)
    return Bad("src and dst overlap without being the same");
  if (step.first && !(reads && step.src.region == Region::kIn))
    return Bad("`first`, but src is not in");
  if (step.last && !finishes) return Bad("`last`, but there is nothing to finish");
  if (kind == StepKind::kRecvReduce && !Reduces(problems_[rank].op))
    return Bad("this collective only moves data");
  if (kind == StepKind::kCopy) return {};
  if (step.peer < 0 || step.peer >= size_ || static_cast<size_t>(step.peer) == rank)
    return Bad("there is no such peer");
  return {};
}

// Pairs the i-th send with the i-th receive in each direction of each link. Fails if a
// send or a receive has no partner, or a partner of another size.
Status Run::Match() {
  std::map<std::pair<size_t, size_t>, std::deque<size_t>> sends;
  const auto link = [](size_t from, size_t to) { return std::pair(from, to); };
  for (size_t r = 0; r < nodes_.size(); ++r) {
    for (size_t i = 0; i < nodes_[r].size(); ++i) {
      const Step& step = *nodes_[r][i].step;
      if (step.kind == StepKind::kSend)
        sends[link(r, static_cast<size_t>(step.peer))].push_back(i);
    }
  }
  for (size_t r = 0; r < nodes_.size(); ++r) {
    for (size_t i = 0; i < nodes_[r].size(); ++i) {
      const Step& step = *nodes_[r][i].step;
      if (step.kind == StepKind::kSend || step.kind == StepKind::kCopy) continue;
      const auto peer = static_cast<size_t>(step.peer);
      std::deque<size_t>& queue = sends[link(peer, r)];
      if (queue.empty()) return Bad(Where({r, i}) + "nobody sends that");
      Node& send = nodes_[peer][queue.front()];
      if (send.step->src.count != step.dst.count)
        return Bad(Where({r, i}) + "but " + Where({peer, queue.front()}) +
                   "another size");
      nodes_[r][i].partner = queue.front();
      send.partner = i;
      queue.pop_front();
    }
  }
  for (const auto& [ends, queue] : sends) {
    if (!queue.empty())
      return Bad(Where({ends.first, queue.front()}) + "nobody receives that");
  }
  return {};
}

// Makes each step of a rank wait for the earlier steps that conflict with it or that
// use the same direction of the same link.
void Run::Order(std::vector<Node>* nodes) const {
  for (size_t j = 0; j < nodes->size(); ++j) {
    const Step& late = *(*nodes)[j].step;
    for (size_t i = 0; i < j; ++i) {
      const Step& early = *(*nodes)[i].step;
      const bool same_stream =
          late.kind != StepKind::kCopy && early.kind != StepKind::kCopy &&
          early.peer == late.peer &&
          (early.kind == StepKind::kSend) == (late.kind == StepKind::kSend);
      if (!same_stream && !Conflict(early, late)) continue;
      (*nodes)[i].next.push_back(j);
      ++(*nodes)[j].waits;
    }
  }
}

Status Run::RunAll(Report* report) {
  std::deque<Place> ready;
  size_t left = 0;
  for (size_t r = 0; r < nodes_.size(); ++r) {
    left += nodes_[r].size();
    for (size_t i = 0; i < nodes_[r].size(); ++i)
      if (nodes_[r][i].waits == 0) ready.push_back({r, i});
  }
  while (!ready.empty()) {
    const Place p = ready.front();
    ready.pop_front();
    const bool copy = At(p).step->kind == StepKind::kCopy;
    if (At(p).done || (!copy && At(Partner(p)).waits > 0)) continue;
    RJ_TRY(RunOne(p, report));
    left -= copy ? 1 : 2;
    const Place other = copy ? p : Partner(p);
    Complete(p, &ready);
    if (!copy) Complete(other, &ready);
  }
  return left == 0 ? Status() : Deadlock();
}

void Run::Complete(Place p, std::deque<Place>* ready) {
  At(p).done = true;
  for (const size_t i : At(p).next)
    if (--nodes_[p.rank][i].waits == 0) ready->push_back({p.rank, i});
}

// Runs a copy, or the message that has `p` as one of its ends.
Status Run::RunOne(Place p, Report* report) {
  const StepKind kind = At(p).step->kind;
  if (kind == StepKind::kCopy) {
    Result<Pieces> pieces = Take(p);
    return pieces.ok() ? Store(p, std::move(pieces.value())) : pieces.status();
  }
  const Place from = kind == StepKind::kSend ? p : Partner(p), to = Partner(from);
  Result<Pieces> sent = Take(from);
  if (!sent.ok()) return sent.status();
  uint64_t depth = 0;
  for (const Piece& piece : sent.value()) depth = std::max(depth, piece.value.depth);
  for (Piece& piece : sent.value()) piece.value.depth = depth + 1;
  report->steps = std::max(report->steps, depth + 1);
  report->sent[from.rank] += At(from).step->src.count;
  ++report->messages[from.rank];
  if (At(to).step->kind == StepKind::kRecv) return Store(to, std::move(sent.value()));

  Result<Pieces> own = Take(to);
  if (!own.ok()) return own.status();
  Result<Pieces> result = symbolic::Reduce(own.value(), sent.value());
  if (!result.ok()) return Bad(Where(to) + result.status().message());
  return Store(to, std::move(result.value()));
}

// Reads the src of a step. `first` must be set if, and only if, src is an untouched
// contribution; otherwise fails.
Result<Pieces> Run::Take(Place p) {
  const Step& step = *At(p).step;
  std::optional<Pieces> pieces =
      memory_[p.rank][Physical(step.src.region)].Read(step.src.offset, step.src.count);
  if (!pieces) return Bad(Where(p) + "src was never written");
  for (Piece& piece : *pieces) {
    if (step.first && !piece.value.raw)
      return Bad(Where(p) +
                 "`first`, but src is not this rank's untouched contribution");
    if (!step.first && piece.value.raw)
      return Bad(Where(p) + "not `first`, but src is an untouched contribution");
    piece.value.raw = false;
  }
  return std::move(*pieces);
}

Status Run::Store(Place p, Pieces pieces) {
  const Step& step = *At(p).step;
  const bool reduces = Reduces(problems_[p.rank].op);
  for (Piece& piece : pieces) {
    if (!step.last) break;
    if (piece.value.finished) return Bad(Where(p) + "it is finished already");
    if (reduces && piece.value.who != all_)
      return Bad(Where(p) + "`last`, but contributions are missing");
    if (reduces && finished_.Touches(piece.value.position, piece.count))
      return Bad(Where(p) +
                 "these elements are finished twice, ranks could round them "
                 "differently");
    piece.value.finished = true;
    if (reduces) finished_.Write(piece.value.position, {piece});
  }
  memory_[p.rank][Physical(step.dst.region)].Write(step.dst.offset, pieces);
  return {};
}

Status Run::Deadlock() {
  std::string text = "deadlock";
  for (size_t r = 0; r < nodes_.size(); ++r) {
    const auto stuck = std::find_if(nodes_[r].begin(), nodes_[r].end(),
                                    [](const Node& node) { return !node.done; });
    if (stuck == nodes_[r].end()) continue;
    const auto i = static_cast<size_t>(stuck - nodes_[r].begin());
    text += "; " + Where({r, i}) + "waits";
  }
  return Bad(text);
}

Status Run::CheckResult(size_t rank) {
  const Memory& out = memory_[rank][Physical(Region::kOut)];
  uint64_t offset = 0;
  for (const Promise::Part& part : promises_[rank].parts) {
    const std::optional<Pieces> pieces = out.Read(offset, part.count);
    const std::string where = "rank " + std::to_string(rank) + ": " +
                              Text({Region::kOut, offset, part.count}) + " ";
    if (!pieces) return Bad(where + "was never written");
    const Ranks who = part.source < 0 ? all_ : Ranks(part.source, size_);
    uint64_t position = part.position;
    for (const Piece& piece : *pieces) {
      if (piece.value.raw) return Bad(where + "is still the input");
      if (piece.value.who != who) return Bad(where + "has the wrong contributions");
      if (piece.value.position != position) return Bad(where + "has wrong elements");
      if (part.source < 0 && !piece.value.finished)
        return Bad(where + "was never finished");
      position += piece.count;
    }
    offset += part.count;
  }
  return {};
}

Report Failed(const Status& status) {
  Report report;
  report.error = status.message();
  return report;
}

}  // namespace

Report VerifySchedules(const std::vector<Problem>& problems,
                       const std::vector<Schedule>& schedules) {
  if (problems.empty() || problems.size() != schedules.size())
    return Failed(Bad("one problem and one schedule for each rank, at least one"));
  if (Status s = CheckAgreement(problems); !s.ok()) return Failed(s);
  const Collective op = problems[0].op;
  const bool aliases = op == Collective::kAllreduce || op == Collective::kBroadcast;
  Report report;
  for (const bool aliased : {false, true}) {
    if (aliased && !aliases) continue;
    report = {};
    report.sent.resize(problems.size());
    report.messages.resize(problems.size());
    const Status status = Run(problems, schedules, aliased).Execute(&report);
    if (!status.ok())
      return Failed(Bad(status.message() + (aliased ? " [in and out are one]" : "")));
  }
  report.ok = true;
  return report;
}

Report Verify(const Algorithm& algorithm, const std::vector<Problem>& problems,
              const std::vector<int>& host) {
  const int size = static_cast<int>(host.size());
  if (problems.empty() || problems.size() != host.size())
    return Failed(Bad("one problem and one host for each rank, at least one"));
  if (Status s = CheckAgreement(problems); !s.ok()) return Failed(s);
  if (problems[0].op != algorithm.op) return Failed(Bad("another collective"));
  std::vector<Schedule> schedules;
  for (int r = 0; r < size; ++r) {
    const Topology topology{r, size, host, true};
    if (!algorithm.applies(topology))
      return Failed(Bad("it does not apply to these hosts"));
    schedules.push_back(algorithm.generate(problems[static_cast<size_t>(r)], topology));
  }
  return VerifySchedules(problems, schedules);
}

}  // namespace ringjax
