// One call from the turnstile to the finished buffers. See communicator.h; what the
// call is split into is in requests.cc, what goes wrong in blame.cc, waiting for long
// in stall.cc, what a generation is in generation.cc.
#include "engine/communicator/communicator.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <thread>

#include "base/failpoint.h"
#include "engine/call/agreement.h"
#include "engine/call/notes.h"
#include "engine/call/tiles.h"
#include "engine/communicator/succession.h"
#include "transport/loans.h"

namespace ringjax {
Communicator::Communicator(CommunicatorOptions options,
                           std::vector<std::unique_ptr<Link>> links,
                           std::unique_ptr<Doorbell> doorbell,
                           std::unique_ptr<Board> board,
                           std::shared_ptr<Succession> succession)
    : options_(std::move(options)),
      doorbell_(std::move(doorbell)),
      succession_(std::move(succession)),
      progress_(succession_ ? std::make_shared<Progress>() : nullptr) {
  options_.topology.board = board != nullptr;
  lane_.links = std::move(links);
  lane_.board = std::move(board);
  lane_.rank = rank();
  lane_.timeout = options_.collective_timeout;
  const auto& host = options_.topology.host;
  const long neighbours = std::count(host.begin(), host.end(), host[rank()]);
  // CPUs of the machine, not those this process is bound to: a launcher that binds
  // ranks gives each one its own.
  crowded_ = neighbours > static_cast<long>(std::thread::hardware_concurrency());
}

Communicator::~Communicator() {
  Abort(Status(Code::kUnavailable, "the communicator was shut down"));
}

std::string Communicator::Prefix() const {
  return "RINGJAX[" + options_.name + ", epoch " + std::to_string(options_.epoch) +
         "]: ";
}

Status Communicator::RunLast(uint64_t ticket, std::vector<Piece>* pieces) {
  if (Continues()) return succession_->RunLast(*this, ticket, pieces);
  return RunInTurn(ticket, *pieces->back().call, &pieces->back().epoch);
}

uint64_t Communicator::TakeTicket() {
  return Continues() ? succession_->TakeTicket() : turnstile_.Take();
}

Status Communicator::Run(const Call& call, uint32_t* epoch) {
  return RunInTurn(TakeTicket(), call, epoch);
}

Status Communicator::RunInTurn(uint64_t ticket, const Call& call, uint32_t* epoch) {
  if (Continues()) return succession_->Run(*this, ticket, call, epoch);
  if (epoch) *epoch = options_.epoch;
  return InTurn(ticket, call, [&] {
    Attempt attempt;
    return RunExclusive(call, &attempt);
  });
}

Status Communicator::Compare(const Call& call, const Status& fits, bool* refused) {
  return InTurn(turnstile_.Take(), call, [&] {
    Waiter waiter(doorbell_.get(), &aborted_, options_.spin_seconds, crowded_);
    Frame frame;
    Agreement agreement;
    event_ = Event::Now();
    *refused = false;
    RJ_TRY(Enter(call, fits, &frame, &waiter, &agreement));
    *refused = agreement.refused;
    event_.agreed = Clock::now();
    event_.device = true;
    for (const Tensor& t : call.tensors) event_.bytes += t.bytes();
    Report(call, event_.agreed, agreement.outcome.code());
    Remember(call);
    return agreement.outcome;
  });
}

Status Communicator::InTurn(uint64_t ticket, const Call& call,
                            const std::function<Status()>& body) {
  bool interrupted = false;
  const Status turn = turnstile_.Wait(ticket, [&] {
    if (aborted()) return abort_status();
    const InterruptCheck check = interrupt_check.load();
    interrupted = check != nullptr && check();
    if (!interrupted) return OkStatus();
    return Status(Code::kCancelled, "interrupted while waiting for its turn");
  });
  if (!turn.ok()) return interrupted ? Fail(call, turn) : Aborted(call);
  const Turn here(&turnstile_);
  return Guarded(call, body);
}

Status Communicator::Guarded(const Call& call, const std::function<Status()>& body) {
  const Active active(this);
  // In one order with Active's mark, and with the abort before a report.
  if (aborted_.load(std::memory_order_seq_cst)) return Aborted(call);
  try {
    const Status status = body();
    if (!status.ok() && aborted()) Report(call, Clock::now(), status.code());
    if (!aborted()) finished_.store(entered(), std::memory_order_relaxed);
    return status;
  } catch (const std::exception& e) {  // out of memory, most likely: peers must know
    return Fail(call, Status(Code::kInternal, std::string("failed: ") + e.what()));
  }
}

Status Communicator::Begin(const Call& call, Frame* frame) {
  if (aborted()) return Aborted(call);
  if (Status left = CheckLeft(entered() + 1); !left.ok()) return Fail(call, left);
  // Counted and voted on even if it is not valid, so that all ranks stay in step.
  entered_.fetch_add(1, std::memory_order_relaxed);
  if (progress_) progress_->Begun(entered());
  patience_ = {};
  noted_ = false;
  lane_.timeout = call.timeout >= 0 ? call.timeout : options_.collective_timeout;
  lane_.look = lane_.timeout > 0 ? std::min(1.0, lane_.timeout / 4) : 1.0;
  lane_.on_stall = [this, &call](double seconds, const std::vector<int>& peers,
                                 bool* end) {
    return OnStall(call, seconds, peers, end);
  };
  frame->job = options_.job;
  frame->epoch = options_.epoch;
  frame->communicator = static_cast<uint32_t>(options_.id);
  frame->sequence = entered();
  return OkStatus();
}

Status Communicator::Enter(const Call& call, const Status& fits, Frame* frame,
                           Waiter* waiter, Agreement* agreement) {
  RJ_TRY(Begin(call, frame));
  frame->fingerprint = Fingerprint(call);
  return AgreeOn(call, fits, *frame, waiter, agreement);
}

Status Communicator::RunDecided(const Call& call) {
  return InTurn(turnstile_.Take(), call, [&] {
    Attempt attempt;
    return RunExclusive(call, &attempt, nullptr, true);
  });
}

Status Communicator::RunExclusive(const Call& call, Attempt* attempt,
                                  const Status* fits, bool decided) {
  const Status status = Perform(call, attempt, fits, decided);
  if (progress_ && !attempt->complete) Seal(attempt);
  return status;
}

Status Communicator::Perform(const Call& call, Attempt* attempt, const Status* fits,
                             bool decided) {
  event_ = Event::Now();
  Waiter waiter(doorbell_.get(), &aborted_, options_.spin_seconds, crowded_);
  Frame frame;
  Agreement agreement;
  const Status valid = fits && !fits->ok() ? *fits : Validate(call);
  std::vector<Request> requests;
  if (valid.ok()) requests = Split(call);
  const bool note = IsNote(requests);
  using Rest = Attempt::Rest;
  if (note && !options_.ending) attempt->rest = Rest::kNote;
  if (valid.ok() && requests.empty() && !options_.ending)
    attempt->rest = Rest::kNothing;
  // (The ranks of an alltoall may agree twice.)
  Board* const board = lane_.board.get();
  if (board && attempt->rest != Rest::kLost && call.op != Collective::kAlltoall)
    attempt->turn = lane_.board->mine(Board::kAgreed) + 1;
  if (note) PutNote(requests[0].problem, requests[0].arithmetic, requests[0].in, lane_);
  agreement.told_splits = note;
  if (decided && valid.ok() && !note)
    RJ_TRY(Begin(call, &frame));
  else
    RJ_TRY(Enter(call, valid, &frame, &waiter, &agreement));
  event_.agreed = Clock::now();
  if (agreement.outcome.ok()) {
    if (Status s = AtFailpoint(Failpoint::kAgreed); !s.ok()) return Fail(call, s);
    if (note) RJ_TRY(TakeNotes(call, &requests, &agreement.outcome, attempt));
  }
  if (!agreement.outcome.ok()) {
    Report(call, event_.agreed, agreement.outcome.code());
    Remember(call);
    return Close(call, agreement.outcome, Barrier::kFrames, frame, &waiter, attempt);
  }
  if (progress_ && !requests.empty()) {
    progress_->set_repeatable(fits || call.KeepsInputs());
    if (requests.size() == 1 && !options_.ending)
      attempt->summed = SumsStay(requests[0]);
    if (attempt->summed > 0) attempt->rest = Rest::kTiles;
  }
  Barrier barrier = Barrier::kNone;
  const auto fetched = [&] { return board ? board->mine(Board::kFetched) : 0; };
  for (Request& request : requests) {
    const uint64_t before = fetched();
    if (Status s = RunRequest(&request, frame, &waiter); !s.ok()) return Fail(call, s);
    barrier = fetched() != before ? Barrier::kFetched : Barrier::kFrames;
    ++frame.step;
  }
  // What the board has, or nothing, needs no rank to wait for the others' results.
  if (attempt->rest != Rest::kLost) barrier = Barrier::kNone;
  RJ_TRY(Close(call, OkStatus(), barrier, frame, &waiter, attempt));
  Record(call);
  return OkStatus();
}

Status Communicator::TakeNotes(const Call& call, std::vector<Request>* requests,
                               Status* outcome, Attempt* attempt) {
  Request& request = requests->front();
  const Problem& problem = request.problem;
  const Arithmetic& arithmetic = request.arithmetic;
  Values values;
  bool whole = false;
  if (options_.ending) progress_->set_repeatable(call.KeepsInputs());
  const Status read = ReadNotes(problem, arithmetic, lane_, &values, &whole);
  if (read.code() == Code::kMismatch) *outcome = Named(call, read);
  if (!read.ok()) return outcome->ok() ? Fail(call, read) : OkStatus();
  if (!whole) {
    attempt->rest = Attempt::Rest::kLost;
    return OkStatus();
  }
  Finish(problem, arithmetic, values, rank(), request.out);
  Count(request, kShared, request.wire_bytes());
  requests->clear();
  return OkStatus();
}

void Communicator::Record(const Call& call) {
  const auto end = Clock::now();
  Report(call, end, Code::kOk);
  std::lock_guard lock(mutex_);
  OpStats& stats = stats_[static_cast<size_t>(call.op)];
  ++stats.calls;
  stats.seconds += std::chrono::duration<double>(end - event_.entered).count();
  Note(call, end);
}

void Communicator::Report(const Call& call, Clock::time_point end, Code outcome) {
  event_.done = end;
  // A lane tells of its operations by itself.
  if (!options_.recorder || options_.named || trial_) return;
  if (options_.place > 0 && outcome == Code::kOk)
    return options_.recorder->AddBytes({options_.set, false, call.op}, event_.bytes);
  event_.op = call.op;
  event_.beside = call.beside;
  event_.outcome = outcome;
  event_.set = options_.set;
  event_.epoch = options_.epoch;
  event_.sequence = entered();
  event_.SetName(call.name);
  options_.recorder->Add(event_);
}

void Communicator::Remember(const Call& call) {
  const auto end = Clock::now();
  std::lock_guard lock(mutex_);
  Note(call, end);
}

void Communicator::Note(const Call& call, Clock::time_point end) {
  constexpr size_t kMostName = 128;
  last_.op = call.op;
  last_.name.assign(call.name.substr(0, kMostName));  // no allocation after some calls
  last_.sequence = entered();
  last_.end = end;
  if (!waiting_.empty()) waiting_.clear();
}

Status Communicator::AgreeOn(const Call& call, const Status& valid, const Frame& frame,
                             Waiter* waiter, Agreement* agreement) {
  agreement->refused = size() == 1;
  if (size() == 1) {
    agreement->outcome = valid.ok() ? valid : Named(call, valid);
    return OkStatus();
  }
  bool agreed = false, fit = valid.ok();
  if (Status s = Agree(frame, fit, lane_, waiter, &agreed); !s.ok())
    return Fail(call, s);
  if (agreed && call.op == Collective::kAlltoall && !call.rows.empty() &&
      !call.rows_known && !agreement->told_splits) {
    if (Status s = CheckSplits(call, frame, waiter, &fit); !s.ok())
      return Fail(call, s);
    if (Status s = Agree(frame, fit, lane_, waiter, &agreed); !s.ok())
      return Fail(call, s);
    if (!agreed) {
      agreement->outcome =
          Named(call, {Code::kMismatch,
                       "splits and received_splits of the ranks do not fit together. "
                       "Nothing was exchanged."});
      return OkStatus();
    }
  }
  if (agreed) return OkStatus();
  std::vector<std::string> texts;
  const std::string own =
      valid.ok() ? Explain(call, kMostText) : Refusal(valid.message());
  if (Status s = ExchangeTexts(frame, own, lane_, waiter, &texts); !s.ok())
    return Fail(call, s);
  agreement->refused = std::all_of(texts.begin(), texts.end(), IsRefusal);
  if (valid.ok()) {
    int culprit = -1;
    std::string text = Mismatch(texts, options_.members, options_.name, &culprit);
    agreement->outcome = Status(Code::kMismatch, Prefix() + text, culprit);
  } else {
    agreement->outcome = Named(call, valid);
  }
  return OkStatus();
}

bool Communicator::IsNote(const std::vector<Request>& requests) const {
  if (!lane_.board || requests.size() != 1 || aborted()) return false;
  const Request& request = requests[0];
  const Collective op = request.problem.op;
  if (request.arithmetic.op == ReduceOp::kAdasum ||
      !FitsNote(request.problem, request.arithmetic, *lane_.board))
    return false;
  // A rank that is cut off there could not tell whether the bytes of all have come.
  if (op == Collective::kAlltoall && progress_) return false;
  const std::string_view forced = ForcedAlgorithm(op);
  return forced.empty() || forced == kShared;
}

void Communicator::Count(const Request& request, std::string_view algorithm,
                         uint64_t sent_bytes) {
  event_.bytes += request.bytes;
  event_.algorithm = algorithm;
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
  // Ranks must choose alike, and of an alltoall none knows how much the others give.
  constexpr uint64_t kLong = uint64_t{1} << 30;
  const bool unknown = request->problem.op == Collective::kAlltoall;
  Result<const Planned*> planned =
      PlanFor(request->problem, unknown ? kLong : request->bytes);
  if (!planned.ok()) return planned.status();
  const Plan& plan = planned.value()->plan;
  AddScratch(request, plan.scratch * Width(request->arithmetic.dtype));
  const std::string_view algorithm = planned.value()->algorithm->name;
  Count(*request, algorithm, plan.sent * Width(request->arithmetic.wire));
  if (algorithm == kShared) {
    const auto& counts = request->problem.counts;
    bool could = true;
    if (request->problem.op == Collective::kAllreduce)
      RJ_TRY(AllreduceInTiles(request->memory, counts[0], request->arithmetic, lane_,
                              waiter));
    else
      RJ_TRY(ReducescatterInTiles(request->memory, counts, request->arithmetic, lane_,
                                  waiter, &could));
    if (could) return OkStatus();
  }
  const Status done =
      Execute(plan, request->memory, request->arithmetic, frame, lane_, waiter);
  // Not its own fault: it has heard of something.
  if (GaveUp(done.rank())) AwaitNews();
  return done;
}

bool Communicator::GaveUp(int peer) const {
  if (peer < 0) return false;
  const Loans* loans = lane_.links[peer]->loans();
  return loans != nullptr && loans->gone();
}

uint64_t Communicator::SumsStay(const Request& request) {
  if (!lane_.board || request.problem.op != Collective::kAllreduce ||
      request.arithmetic.op == ReduceOp::kAdasum)
    return 0;
  const auto planned = PlanFor(request.problem, request.bytes);
  if (!planned.ok() || planned.value()->algorithm->name != kShared) return 0;
  return SummedAt(request.problem.counts[0], request.arithmetic, *lane_.board);
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

Communicator::Comparison& Communicator::comparison(uint64_t whose) {
  std::lock_guard lock(mutex_);
  return comparisons_[whose];  // stays where it is
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

}  // namespace ringjax
