// One call from the turnstile to the finished buffers. See communicator.h; what the
// call is split into is in requests.cc.
#include "engine/communicator.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <exception>
#include <thread>

#include "engine/agreement.h"
#include "engine/tiles.h"

namespace ringjax {
namespace {

// Leaves the turnstile whatever happens: a turn that is kept would stop all others.
class Turn {
 public:
  explicit Turn(Turnstile* turnstile) : turnstile_(turnstile) {}
  ~Turn() { turnstile_->Leave(); }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

 private:
  Turnstile* turnstile_;
};

}  // namespace

uint64_t Turnstile::Take() {
  std::lock_guard lock(mutex_);
  return next_++;
}

Status Turnstile::Wait(uint64_t ticket, const std::function<Status()>& stop) {
  std::unique_lock lock(mutex_);
  while (serving_ != ticket) {
    // Asked before waiting: behind a turn that was lost nobody will call.
    lock.unlock();
    RJ_TRY(stop());
    lock.lock();
    if (serving_ == ticket) break;
    turn_.wait_for(lock, std::chrono::milliseconds(100));
  }
  return OkStatus();
}

void Turnstile::Leave() {
  {
    std::lock_guard lock(mutex_);
    ++serving_;
  }
  turn_.notify_all();
}

void Turnstile::WakeAll() { turn_.notify_all(); }

Communicator::Communicator(CommunicatorOptions options,
                           std::vector<std::unique_ptr<Link>> links,
                           std::unique_ptr<Doorbell> doorbell,
                           std::unique_ptr<Board> board)
    : options_(std::move(options)), doorbell_(std::move(doorbell)) {
  options_.topology.board = board != nullptr;
  lane_.links = std::move(links);
  lane_.board = std::move(board);
  lane_.rank = rank();
  lane_.timeout = options_.collective_timeout;
  const auto& host = options_.topology.host;
  const long neighbours = std::count(host.begin(), host.end(), host[rank()]);
  crowded_ = neighbours > static_cast<long>(std::thread::hardware_concurrency());
}

Communicator::~Communicator() {
  Abort(Status(Code::kUnavailable, "the communicator was shut down"));
}

std::string Communicator::Prefix() const {
  return "RINGJAX[" + options_.name + ", epoch " + std::to_string(options_.epoch) +
         "]: ";
}

Status Communicator::Run(const Call& call) { return RunInTurn(TakeTicket(), call); }

Status Communicator::RunInTurn(uint64_t ticket, const Call& call) {
  return InTurn(ticket, call, [&] { return RunExclusive(call); });
}

Status Communicator::Compare(const Call& call, const Status& fits, bool* refused) {
  return InTurn(TakeTicket(), call, [&] {
    Waiter waiter(doorbell_.get(), &aborted_, options_.spin_seconds, crowded_);
    Frame frame;
    return Enter(call, fits, &frame, &waiter, refused);
  });
}

Status Communicator::InTurn(uint64_t ticket, const Call& call,
                            const std::function<Status()>& body) {
  const Status turn = turnstile_.Wait(ticket, [this] {
    if (aborted()) return abort_status();
    if (InterruptCheck check = interrupt_check.load(); check != nullptr && check())
      return Status(Code::kCancelled, "interrupted while waiting for its turn");
    return OkStatus();
  });
  if (!turn.ok()) return Fail(call, turn);
  const Turn here(&turnstile_);
  try {
    return body();
  } catch (const std::exception& e) {  // out of memory, most likely: peers must know
    return Fail(call, Status(Code::kInternal, std::string("failed: ") + e.what()));
  }
}

Status Communicator::Begin(const Call& call, Frame* frame) {
  if (aborted()) return Fail(call, abort_status());
  if (Status left = CheckLeft(); !left.ok()) return Fail(call, left);
  // Counted and voted on even if it is not valid, so that all ranks stay in step.
  entered_.fetch_add(1, std::memory_order_relaxed);
  warned_ = 0;
  lane_.on_stall = [this, &call](double seconds, const std::vector<int>& peers) {
    return OnStall(call, seconds, peers);
  };
  frame->job = options_.job;
  frame->epoch = options_.epoch;
  frame->communicator = static_cast<uint32_t>(options_.id);
  frame->sequence = entered();
  return OkStatus();
}

Status Communicator::Enter(const Call& call, const Status& fits, Frame* frame,
                           Waiter* waiter, bool* refused) {
  RJ_TRY(Begin(call, frame));
  frame->fingerprint = Fingerprint(call);
  return AgreeOn(call, fits, *frame, waiter, refused);
}

Status Communicator::RunExclusive(const Call& call) {
  const auto start = Clock::now();
  Waiter waiter(doorbell_.get(), &aborted_, options_.spin_seconds, crowded_);
  Frame frame;
  bool refused = false;
  const Status valid = Validate(call);
  std::vector<Request> requests;
  if (valid.ok()) requests = Split(call);
  const bool note = IsNote(requests);
  if (note) PutNote(requests[0].in, requests[0].arithmetic, lane_);
  RJ_TRY(Enter(call, valid, &frame, &waiter, &refused));
  if (note) {
    ReduceNotes(requests[0].out, requests[0].arithmetic, lane_);
    Count(requests[0], kShared, requests[0].wire_bytes());
    requests.clear();
  }
  for (Request& request : requests) {
    if (Status s = RunRequest(&request, frame, &waiter); !s.ok()) return Fail(call, s);
    ++frame.step;
  }
  std::lock_guard lock(mutex_);
  OpStats& stats = stats_[static_cast<size_t>(call.op)];
  ++stats.calls;
  stats.seconds += std::chrono::duration<double>(Clock::now() - start).count();
  return OkStatus();
}

Status Communicator::AgreeOn(const Call& call, const Status& valid, const Frame& frame,
                             Waiter* waiter, bool* refused) {
  *refused = size() == 1;
  if (size() == 1) return valid.ok() ? valid : Named(call, valid);
  bool agreed = false, fit = valid.ok();
  if (Status s = Agree(frame, fit, lane_, waiter, &agreed); !s.ok())
    return Fail(call, s);
  if (agreed && call.op == Collective::kAlltoall && !call.rows.empty() &&
      !call.rows_known) {
    if (Status s = CheckSplits(call, frame, waiter, &fit); !s.ok())
      return Fail(call, s);
    if (Status s = Agree(frame, fit, lane_, waiter, &agreed); !s.ok())
      return Fail(call, s);
    if (!agreed)
      return Named(call, {Code::kMismatch,
                          "splits and received_splits of the ranks do not fit "
                          "together. Nothing was exchanged."});
  }
  if (agreed) return OkStatus();
  std::vector<std::string> texts;
  const std::string own =
      valid.ok() ? Explain(call, kMostText) : Refusal(valid.message());
  if (Status s = ExchangeTexts(frame, own, lane_, waiter, &texts); !s.ok())
    return Fail(call, s);
  *refused = std::all_of(texts.begin(), texts.end(), IsRefusal);
  if (!valid.ok()) return Named(call, valid);
  int culprit = -1;
  std::string text = Mismatch(texts, options_.members, options_.name, &culprit);
  return Status(Code::kMismatch, Prefix() + text, culprit);
}

bool Communicator::IsNote(const std::vector<Request>& requests) const {
  if (!lane_.board || requests.size() != 1 || aborted()) return false;
  const Request& request = requests[0];
  if (request.problem.op != Collective::kAllreduce ||
      request.arithmetic.op == ReduceOp::kAdasum || !FitsNote(request.wire_bytes()))
    return false;
  const std::string_view forced = ForcedAlgorithm(Collective::kAllreduce);
  return forced.empty() || forced == kShared;
}

void Communicator::Count(const Request& request, std::string_view algorithm,
                         uint64_t sent_bytes) {
  std::lock_guard lock(mutex_);
  OpStats& stats = stats_[static_cast<size_t>(request.problem.op)];
  stats.bytes += request.bytes;
  stats.sent_bytes += sent_bytes;
  ++stats.algorithms[algorithm];
}

Status Communicator::RunRequest(Request* request, const Frame& frame, Waiter* waiter) {
  request->memory.in = &request->in;
  request->memory.out = &request->out;
  if (request->arithmetic.op == ReduceOp::kAdasum)
    return RunAdasum(request, frame, waiter);
  Result<const Planned*> planned = PlanFor(request->problem, request->bytes);
  if (!planned.ok()) return planned.status();
  const Plan& plan = planned.value()->plan;
  AddScratch(request, plan.scratch * Width(request->arithmetic.dtype));
  const std::string_view algorithm = planned.value()->algorithm->name;
  Count(*request, algorithm, plan.sent * Width(request->arithmetic.wire));
  if (algorithm == kShared)
    return AllreduceInTiles(request->memory, request->problem.counts[0],
                            request->arithmetic, lane_, waiter);
  return Execute(plan, request->memory, request->arithmetic, frame, lane_, waiter);
}

Result<const Communicator::Planned*> Communicator::PlanFor(const Problem& problem,
                                                           uint64_t bytes) {
  constexpr size_t kMostPlans = 512;
  std::vector<uint64_t> key = problem.counts;
  key.push_back(bytes);
  key.push_back(static_cast<uint64_t>(problem.root));
  key.push_back(static_cast<uint64_t>(problem.op));
  auto found = plans_.find(key);
  if (found == plans_.end()) {
    if (plans_.size() >= kMostPlans) plans_.clear();
    Result<const Algorithm*> chosen = Choose(problem.op, ForcedAlgorithm(problem.op),
                                             bytes, options_.topology, options_.cost);
    if (!chosen.ok()) return chosen.status();
    const Algorithm& algorithm = *chosen.value();
    RJ_TRY(CheckProblem(problem, size()));
    const bool in_place =
        problem.op == Collective::kAllreduce || problem.op == Collective::kBroadcast;
    const Schedule schedule = algorithm.generate(problem, options_.topology);
    Planned planned{&algorithm, Compile(schedule, size(), in_place)};
    found = plans_.emplace(std::move(key), std::move(planned)).first;
  }
  return &found->second;
}

void Communicator::SetCost(const CostModel& cost, const std::string& algorithm) {
  const auto stop = [this] { return aborted() ? abort_status() : OkStatus(); };
  if (!turnstile_.Wait(turnstile_.Take(), stop).ok()) return;  // no call follows
  const Turn here(&turnstile_);
  options_.cost = cost;
  options_.algorithm = algorithm;
  plans_.clear();
  std::lock_guard lock(mutex_);
  stats_ = {};
}

void Communicator::Abort(const Status& status) {
  {
    std::lock_guard lock(mutex_);
    if (abort_status_.ok()) abort_status_ = status;
  }
  aborted_.store(true, std::memory_order_release);
  doorbell_->Ring();
  turnstile_.WakeAll();
}

Status Communicator::abort_status() const {
  std::lock_guard lock(mutex_);
  return abort_status_;
}

std::map<std::string, OpStats> Communicator::stats() const {
  std::lock_guard lock(mutex_);
  std::map<std::string, OpStats> all;
  for (size_t op = 0; op < stats_.size(); ++op)
    if (stats_[op].calls > 0) all[std::string(kCollectiveNames[op])] = stats_[op];
  return all;
}

std::map<std::string, int> Communicator::transports() const {
  std::map<std::string, int> all;
  for (const auto& link : lane_.links)
    if (link) ++all[std::string(link->transport())];
  return all;
}

// A link tells that a peer is gone; the heartbeat tells why, a moment later. So it may
// of one that left in good order: because another was lost before.
Status Communicator::Fail(const Call& call, const Status& cause) {
  if (cause.code() == Code::kUnavailable) {
    for (int i = 0; i < 100 && !aborted(); ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  if (!aborted()) End(Blame(call, cause));
  return Named(call, abort_status());
}

void Communicator::End(const Status& blame) {
  const Code code = blame.code() == Code::kInternal ? Code::kUnavailable : blame.code();
  Abort(Status(code, "rank " + std::to_string(blame.rank()) + " " + blame.message(),
               blame.rank()));
  if (on_failure_) on_failure_(blame);
}

void Communicator::GiveUp(Code code, const std::string& what, int culprit) {
  const int world = culprit < 0 ? options_.members[rank()] : culprit;
  if (!aborted()) End(Status(code, what, world));
}

// As it is shown: with the mark, the operation and what went wrong.
Status Communicator::Named(const Call& call, const Status& status) const {
  return Status(status.code(), Prefix() + Where(call) + ": " + status.message(),
                status.rank());
}

// Who caused it, as a world rank, and what it did, as a predicate: peers are told these
// two, so that all ranks print the same sentence.
Status Communicator::Blame(const Call& call, const Status& cause) const {
  const int here = options_.members[rank()];
  int world = cause.rank() < 0 ? here : options_.members[cause.rank()];
  std::string what = cause.message();
  if (cause.code() == Code::kCancelled) what = "was " + what;
  if (cause.code() == Code::kDeadlineExceeded) {
    char seconds[32];
    std::snprintf(seconds, sizeof seconds, " for %g s", options_.collective_timeout);
    std::vector<int> late;
    if (laggards_) late = laggards_(entered());
    if (!late.empty()) {
      world = late.front();
      what = "has not called " + Where(call);
    }
    what += seconds;
    for (size_t i = 1; i < late.size(); ++i)
      what += (i == 1 ? ", nor has rank " : ", rank ") + std::to_string(late[i]);
  }
  return Status(cause.code(), what, world);
}

// "rank 2, rank 3": who has not even entered this call if the heartbeat knows, else the
// peers whose links are waited for.
std::string Communicator::Waited(const std::vector<int>& peers) const {
  std::vector<int> world;
  if (laggards_) world = laggards_(entered());
  if (world.empty())
    for (int peer : peers) world.push_back(options_.members[peer]);
  std::string text;
  for (int r : world) text += (text.empty() ? "rank " : ", rank ") + std::to_string(r);
  return text.empty() ? "its peers" : text;
}

Status Communicator::OnStall(const Call& call, double seconds,
                             const std::vector<int>& peers) {
  RJ_TRY(CheckLeft());
  if (options_.stall_warning <= 0 || seconds < options_.stall_warning ||
      seconds < warned_ * 2)
    return OkStatus();
  warned_ = seconds;
  std::fprintf(stderr,
               "[ringjax %d/%d e%u] %s has waited %.0f s for %s; still waiting\n",
               options_.members[rank()], size(), options_.epoch, Where(call).c_str(),
               seconds, Waited(peers).c_str());
  return OkStatus();
}

void Communicator::PeerLeft(int world_rank) {
  int none = -1;
  left_.compare_exchange_strong(none, world_rank);
  doorbell_->Ring();
}

Status Communicator::CheckLeft() const {
  const int left = left_.load();
  if (left < 0) return OkStatus();
  const auto& members = options_.members;
  const auto at = std::find(members.begin(), members.end(), left) - members.begin();
  return Status(Code::kUnavailable, "has shut down", static_cast<int>(at));
}

std::string Communicator::Where(const Call& call) const {
  std::string text = call.Title() + " (";
  if (call.tensors.size() == 1)
    text += Describe(call.tensors[0]);
  else
    text += std::to_string(call.tensors.size()) + " tensors";
  if (call.op == Collective::kAllreduce || call.op == Collective::kReducescatter)
    text += ", " + std::string(Name(call.reduce_op));
  return text + ", seq " + std::to_string(entered()) + ")";
}

}  // namespace ringjax
