// One call, from the ticket lock to the finished buffers. See communicator.h. Other
// parts of the class: requests.cc splits a call into requests, blame.cc handles
// failures, stall.cc long waits, call_attempt.cc epochs, and rounds.cc rounds.
#include "engine/communicator/communicator.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <thread>

#include "base/failpoint.h"
#include "engine/call/agreement.h"
#include "engine/call/inline_data.h"
#include "engine/call/tiles.h"
#include "engine/communicator/resilient_comm.h"
#include "transport/cma.h"

namespace ringjax {
Communicator::Communicator(CommunicatorOptions options,
                           std::vector<std::unique_ptr<Link>> links,
                           std::unique_ptr<Doorbell> doorbell,
                           std::unique_ptr<SharedSegment> segment,
                           std::shared_ptr<ResilientComm> resilient)
    : options_(std::move(options)),
      doorbell_(std::move(doorbell)),
      resilient_(std::move(resilient)),
      progress_(resilient_ ? std::make_shared<Progress>() : nullptr) {
  options_.topology.segment = segment != nullptr;
  endpoints_.links = std::move(links);
  endpoints_.segment = std::move(segment);
  endpoints_.rank = rank();
  endpoints_.timeout = options_.collective_timeout;
  const auto& host = options_.topology.host;
  const long neighbours = std::count(host.begin(), host.end(), host[rank()]);
  // Counts the CPUs of the machine, not those to which this process is bound: a
  // launcher that binds ranks gives each rank CPUs of its own.
  oversubscribed_ = neighbours > static_cast<long>(std::thread::hardware_concurrency());
}

Communicator::~Communicator() {
  Abort(Status(Code::kUnavailable, "the communicator was shut down"));
}

std::string Communicator::Prefix() const {
  return "RINGJAX[" + options_.name + ", epoch " + std::to_string(options_.epoch) +
         "]: ";
}

Status Communicator::RunLastOfChain(uint64_t ticket, std::vector<ChainedCall>* chain) {
  if (Continues()) return resilient_->RunLastOfChain(*this, ticket, chain);
  return RunInTurn(ticket, *chain->back().call, &chain->back().epoch);
}

uint64_t Communicator::TakeTicket() {
  return Continues() ? resilient_->TakeTicket() : ticket_lock_.Take();
}

Status Communicator::Run(const Call& call, uint32_t* epoch) {
  return RunInTurn(TakeTicket(), call, epoch);
}

Status Communicator::RunInTurn(uint64_t ticket, const Call& call, uint32_t* epoch) {
  if (Continues()) return resilient_->Run(*this, ticket, call, epoch);
  if (epoch) *epoch = options_.epoch;
  return InTurn(ticket, call, [&] {
    CallAttempt attempt;
    return RunExclusive(call, &attempt);
  });
}

Status Communicator::Compare(const Call& call, const Status& fits, bool* refused) {
  return InTurn(ticket_lock_.Take(), call, [&] {
    Waiter waiter(doorbell_.get(), &aborted_, options_.spin_seconds, oversubscribed_);
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
  const Status turn = ticket_lock_.Wait(ticket, [&] {
    if (aborted()) return abort_status();
    const InterruptCheck check = interrupt_check.load();
    interrupted = check != nullptr && check();
    if (!interrupted) return OkStatus();
    return Status(Code::kCancelled, "interrupted while waiting for its turn");
  });
  if (!turn.ok()) return interrupted ? Fail(call, turn) : Aborted(call);
  const TicketLockGuard here(&ticket_lock_);
  return Guarded(call, body);
}

Status Communicator::Guarded(const Call& call, const std::function<Status()>& body) {
  const Active active(this);
  // seq_cst: pairs with Abort, which stores the flag before Quiesce reads the mark of
  // Active. Either this load sees the abort, or Quiesce sees the mark and waits for
  // this call. If this load could pass the store of the mark, neither might happen.
  if (aborted_.load(std::memory_order_seq_cst)) return Aborted(call);
  try {
    const Status status = body();
    if (!status.ok() && aborted()) Report(call, Clock::now(), status.code());
    if (!aborted()) finished_.store(entered(), std::memory_order_relaxed);
    return status;
  } catch (const std::exception& e) {  // std::bad_alloc, most likely
    return Fail(call, Status(Code::kInternal, std::string("failed: ") + e.what()));
  }
}

Status Communicator::Begin(const Call& call, Frame* frame) {
  if (aborted()) return Aborted(call);
  if (Status left = CheckShutdowns(entered() + 1); !left.ok()) return Fail(call, left);
  // A call that is not valid on this rank is counted, too, so that the sequence numbers
  // of all ranks stay equal.
  entered_.fetch_add(1, std::memory_order_relaxed);
  if (progress_) progress_->Begun(entered());
  stall_monitor_ = {};
  waiting_recorded_ = false;
  endpoints_.timeout = call.timeout >= 0 ? call.timeout : options_.collective_timeout;
  endpoints_.look =
      endpoints_.timeout > 0 ? std::min(1.0, endpoints_.timeout / 4) : 1.0;
  endpoints_.on_stall = [this, &call](double seconds, const std::vector<int>& peers,
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

Status Communicator::RunNegotiated(const Call& call) {
  return InTurn(ticket_lock_.Take(), call, [&] {
    CallAttempt attempt;
    return RunExclusive(call, &attempt, nullptr, true);
  });
}

Status Communicator::RunExclusive(const Call& call, CallAttempt* attempt,
                                  const Status* fits, bool decided) {
  const Status status = Perform(call, attempt, fits, decided);
  if (progress_ && !attempt->locally_complete) Seal(attempt);
  return status;
}

Status Communicator::Perform(const Call& call, CallAttempt* attempt, const Status* fits,
                             bool decided) {
  event_ = Event::Now();
  Waiter waiter(doorbell_.get(), &aborted_, options_.spin_seconds, oversubscribed_);
  Frame frame;
  Agreement agreement;
  const Status valid = fits && !fits->ok() ? *fits : Validate(call);
  std::vector<Request> requests;
  if (valid.ok()) requests = Split(call);
  const bool inlined = IsInline(requests);
  using Source = CallAttempt::Source;
  if (inlined && !options_.end_barrier) attempt->source = Source::kInlineData;
  if (valid.ok() && requests.empty() && !options_.end_barrier)
    attempt->source = Source::kNotNeeded;
  // Not for an alltoall, whose ranks may agree twice: then `agreed` would be too low.
  SharedSegment* const segment = endpoints_.segment.get();
  if (segment && attempt->source != Source::kNone && call.op != Collective::kAlltoall)
    attempt->agreed = endpoints_.segment->own(SharedSegment::kAgreed) + 1;
  if (inlined)
    PutInline(requests[0].problem, requests[0].arithmetic, requests[0].in, endpoints_);
  agreement.told_splits = inlined;
  if (decided && valid.ok() && !inlined)
    RJ_TRY(Begin(call, &frame));
  else
    RJ_TRY(Enter(call, valid, &frame, &waiter, &agreement));
  event_.agreed = Clock::now();
  if (agreement.outcome.ok()) {
    if (Status s = AtFailpoint(Failpoint::kAgreed); !s.ok()) return Fail(call, s);
    if (inlined) RJ_TRY(CompleteInline(call, &requests, &agreement.outcome, attempt));
  }
  if (!agreement.outcome.ok()) {
    Report(call, event_.agreed, agreement.outcome.code());
    Remember(call);
    return Close(call, agreement.outcome, Barrier::kFrames, frame, &waiter, attempt);
  }
  if (progress_ && !requests.empty()) {
    progress_->set_repeatable(fits || call.KeepsInputs());
    if (requests.size() == 1 && !options_.end_barrier)
      attempt->reduced = SumsStay(requests[0]);
    if (attempt->reduced > 0) attempt->source = Source::kTileResults;
  }
  Barrier barrier = Barrier::kNone;
  const auto fetched = [&] {
    return segment ? segment->own(SharedSegment::kFinished) : 0;
  };
  for (Request& request : requests) {
    const uint64_t before = fetched();
    if (Status s = RunRequest(&request, frame, &waiter); !s.ok()) return Fail(call, s);
    barrier = fetched() != before ? Barrier::kFinished : Barrier::kFrames;
    ++frame.step;
  }
  // If every rank can complete the call alone, no rank waits until its peers have their
  // results.
  if (attempt->source != Source::kNone) barrier = Barrier::kNone;
  RJ_TRY(Close(call, OkStatus(), barrier, frame, &waiter, attempt));
  Record(call);
  return OkStatus();
}

Status Communicator::CompleteInline(const Call& call, std::vector<Request>* requests,
                                    Status* outcome, CallAttempt* attempt) {
  Request& request = requests->front();
  const Problem& problem = request.problem;
  const Arithmetic& arithmetic = request.arithmetic;
  Values values;
  bool whole = false;
  if (options_.end_barrier) progress_->set_repeatable(call.KeepsInputs());
  const Status read = ReadInline(problem, arithmetic, endpoints_, &values, &whole);
  if (read.code() == Code::kMismatch) *outcome = WithContext(call, read);
  if (!read.ok()) return outcome->ok() ? Fail(call, read) : OkStatus();
  if (!whole) {
    attempt->source = CallAttempt::Source::kNone;
    return OkStatus();
  }
  Finish(problem, arithmetic, values, rank(), request.out);
  Count(request, kShared, "inline", request.wire_bytes());
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
  Record(call, end);
}

void Communicator::Report(const Call& call, Clock::time_point end, Code outcome) {
  event_.done = end;
  // An eager lane records its operations itself.
  if (!options_.recorder || options_.eager || trial_) return;
  if (options_.device_index > 0 && outcome == Code::kOk)
    return options_.recorder->AddBytes({options_.process_set, false, call.op},
                                       event_.bytes);
  event_.op = call.op;
  event_.overlapped = call.overlapped;
  event_.outcome = outcome;
  event_.set = options_.process_set;
  event_.epoch = options_.epoch;
  event_.sequence = entered();
  event_.SetName(call.name);
  options_.recorder->Add(event_);
}

void Communicator::Remember(const Call& call) {
  const auto end = Clock::now();
  std::lock_guard lock(mutex_);
  Record(call, end);
}

void Communicator::Record(const Call& call, Clock::time_point end) {
  constexpr size_t kMostName = 128;
  last_.op = call.op;
  last_.name.assign(call.name.substr(0, kMostName));  // keeps its capacity
  last_.sequence = entered();
  last_.end = end;
  if (!waiting_.empty()) waiting_.clear();
}

Status Communicator::AgreeOn(const Call& call, const Status& valid, const Frame& frame,
                             Waiter* waiter, Agreement* agreement) {
  agreement->refused = size() == 1;
  if (size() == 1) {
    agreement->outcome = valid.ok() ? valid : WithContext(call, valid);
    return OkStatus();
  }
  bool agreed = false, fit = valid.ok();
  if (Status s = Agree(frame, fit, endpoints_, waiter, &agreed); !s.ok())
    return Fail(call, s);
  if (agreed && call.op == Collective::kAlltoall && !call.rows.empty() &&
      !call.rows_known && !agreement->told_splits) {
    if (Status s = CheckSplits(call, frame, waiter, &fit); !s.ok())
      return Fail(call, s);
    if (Status s = Agree(frame, fit, endpoints_, waiter, &agreed); !s.ok())
      return Fail(call, s);
    if (!agreed) {
      agreement->outcome = WithContext(
          call, {Code::kMismatch,
                 "splits and received_splits of the ranks do not fit together. "
                 "Nothing was exchanged."});
      return OkStatus();
    }
  }
  if (agreed) return OkStatus();
  std::vector<std::string> texts;
  const std::string own =
      valid.ok() ? Explain(call, kMostText) : Refusal(valid.message());
  if (Status s = ExchangeTexts(frame, own, endpoints_, waiter, &texts); !s.ok())
    return Fail(call, s);
  agreement->refused = std::all_of(texts.begin(), texts.end(), IsRefusal);
  if (valid.ok()) {
    int culprit = -1;
    std::string text = Mismatch(texts, options_.world_ranks, options_.name, &culprit);
    agreement->outcome = Status(Code::kMismatch, Prefix() + text, culprit);
  } else {
    agreement->outcome = WithContext(call, valid);
  }
  return OkStatus();
}

RouteInputs Communicator::InputsFor(Collective op) const {
  const SharedSegment* segment = endpoints_.segment.get();
  return {options_.topology, options_.cost, ForcedAlgorithm(op),
          segment ? segment->inline_bytes() : 0, progress_ != nullptr};
}

bool Communicator::IsInline(const std::vector<Request>& requests) const {
  if (!endpoints_.segment || requests.size() != 1 || aborted()) return false;
  const Request& r = requests[0];
  return ringjax::IsInline(r.problem, r.arithmetic, InputsFor(r.problem.op));
}

void Communicator::Count(const Request& request, std::string_view algorithm,
                         std::string_view route, uint64_t sent_bytes) {
  event_.bytes += request.bytes;
  event_.algorithm = route;
  std::lock_guard lock(mutex_);
  OpStats& stats = stats_[static_cast<size_t>(request.problem.op)];
  stats.bytes += request.bytes;
  stats.sent_bytes += sent_bytes;
  ++stats.algorithms[algorithm];
}

Status Communicator::RunRequest(Request* request, const Frame& frame, Waiter* waiter) {
  request->buffers.in = &request->in;
  request->buffers.out = &request->out;
  if (request->arithmetic.op == ReduceOp::kAdasum)
    return RunAdasum(request, frame, waiter);
  Result<const Planned*> planned = PlanFor(*request);
  if (!planned.ok()) return planned.status();
  const Route& route = planned.value()->route;
  const Plan& plan = planned.value()->plan;
  AddScratch(request, plan.scratch * Width(request->arithmetic.dtype));
  Count(*request, route.algorithm->name, route.name(),
        plan.sent * Width(request->arithmetic.wire));
  if (route.kind == Route::Kind::kTiles) {
    const auto& counts = request->problem.counts;
    bool could = true;
    if (request->problem.op == Collective::kAllreduce)
      RJ_TRY(AllreduceInTiles(request->buffers, counts[0], request->arithmetic,
                              endpoints_, waiter));
    else
      RJ_TRY(ReducescatterInTiles(request->buffers, counts, request->arithmetic,
                                  endpoints_, waiter, &could));
    if (could) return OkStatus();
  }
  const Status done =
      Execute(plan, request->buffers, request->arithmetic, frame, endpoints_, waiter);
  // A peer that has invalidated its exposed bytes is not the culprit: its call has
  // failed for a reason that arrives as an abort.
  if (HasInvalidated(done.rank())) AwaitReason();
  return done;
}

bool Communicator::HasInvalidated(int peer) const {
  if (peer < 0) return false;
  const CmaEndpoint* cma = endpoints_.links[peer]->cma();
  return cma != nullptr && cma->invalidated();
}

uint64_t Communicator::SumsStay(const Request& request) {
  if (!endpoints_.segment || request.problem.op != Collective::kAllreduce ||
      request.arithmetic.op == ReduceOp::kAdasum)
    return 0;
  const auto planned = PlanFor(request);
  if (!planned.ok() || planned.value()->route.kind != Route::Kind::kTiles) return 0;
  return RetainedWhenReducedIs(request.problem.counts[0], request.arithmetic,
                               *endpoints_.segment);
}

Result<const Communicator::Planned*> Communicator::PlanFor(const Request& request) {
  constexpr size_t kMostPlans = 512;
  const Problem& problem = request.problem;
  std::vector<uint64_t> key = problem.counts;
  key.push_back(Width(request.arithmetic.dtype));
  key.push_back(static_cast<uint64_t>(problem.root));
  key.push_back(static_cast<uint64_t>(problem.op));
  auto found = plans_.find(key);
  if (found == plans_.end()) {
    if (plans_.size() >= kMostPlans) plans_.clear();
    RouteInputs inputs = InputsFor(problem.op);
    inputs.inline_bytes = 0;
    const Result<Route> route = RouteOf(problem, request.arithmetic, inputs);
    if (!route.ok()) return route.status();
    RJ_TRY(CheckProblem(problem, size()));
    const bool in_place =
        problem.op == Collective::kAllreduce || problem.op == Collective::kBroadcast;
    const Schedule schedule =
        route.value().algorithm->generate(problem, options_.topology);
    Planned planned{route.value(), Compile(schedule, size(), in_place)};
    found = plans_.emplace(std::move(key), std::move(planned)).first;
  }
  return &found->second;
}

Communicator::ConsistencyCheck& Communicator::consistency_check(uint64_t whose) {
  std::lock_guard lock(mutex_);
  return consistency_checks_[whose];  // std::map: the reference stays valid
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
  for (const auto& link : endpoints_.links)
    if (link) ++all[std::string(link->transport())];
  return all;
}

}  // namespace ringjax
