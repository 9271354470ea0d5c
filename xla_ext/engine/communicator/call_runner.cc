// Implements CallRunner: runs the agreement, moves the data and ends the call. See
// call_runner.h.
#include "engine/communicator/call_runner.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <exception>

#include "base/failpoint.h"
#include "collective/algorithms.h"
#include "engine/call/adasum.h"
#include "engine/call/agreement.h"
#include "engine/call/inline_data.h"
#include "engine/call/rails.h"
#include "engine/call/tiles.h"
#include "engine/communicator/resilient_comm.h"
#include "transport/cma.h"

namespace ringjax {
namespace {

// While an ActiveMark exists, a call may change the progress report, so
// Communicator::Quiesce waits for the call. A static job never calls Quiesce, and skips
// the two seq_cst stores.
class ActiveMark {
 public:
  explicit ActiveMark(const CommState& state) : state_(state) {
    if (state_.repairs) state_.progress->Begin();
  }
  ~ActiveMark() {
    if (state_.repairs)
      state_.progress->End([this] { return state_.abort.flag().load(); });
  }
  ActiveMark(const ActiveMark&) = delete;
  ActiveMark& operator=(const ActiveMark&) = delete;

 private:
  const CommState& state_;
};

}  // namespace

Status CallRunner::InTurn(const Call& call, const std::function<Status()>& body) {
  const auto guarded = [&] { return Guarded(call, body); };
  return state_.own->InTurn(failures_, state_.own->TakeTicket(), call,
                            std::ref(guarded));  // a copy would allocate memory
}

Status CallRunner::Guarded(const Call& call, const std::function<Status()>& body) {
  const ActiveMark active(state_);
  // This load of the abort flag is seq_cst, because it must not be reordered before the
  // store of the mark in ActiveMark. AbortState::Abort stores the flag before Quiesce
  // loads the mark. So either this load sees the abort, or Quiesce sees the mark and
  // waits for this call.
  if (state_.abort.flag().load(std::memory_order_seq_cst))
    return failures_.Aborted(call);
  try {
    const Status status = body();
    if (!status.ok() && state_.abort.aborted())
      log_.Record(call, Clock::now(), status.code());
    if (!state_.abort.aborted())
      state_.finished.store(state_.sequence(), std::memory_order_relaxed);
    return status;
  } catch (const std::exception& e) {  // std::bad_alloc, most likely
    return failures_.Fail(call,
                          Status(Code::kInternal, std::string("failed: ") + e.what()));
  }
}

Status CallRunner::Validate(const Call& call) const {
  RJ_TRY(CheckCall(call, state_.rank(), state_.size()));
  return planner_.CheckForced(call.op);
}

Status CallRunner::Begin(const Call& call, Frame* frame) {
  if (state_.abort.aborted()) return failures_.Aborted(call);
  if (Status left = state_.abort.CheckShutdowns(state_.sequence() + 1); !left.ok())
    return failures_.Fail(call, left);
  // A call that is not valid on this rank also takes a sequence number, so that the
  // sequence numbers of all ranks stay equal.
  state_.progress->BeginNext();
  Prepare(call, frame);
  frame->sequence = state_.sequence();
  return OkStatus();
}

void CallRunner::Prepare(const Call& call, Frame* frame) {
  frame->job = state_.options.job;
  frame->epoch = state_.options.epoch;
  frame->communicator = static_cast<uint32_t>(state_.options.id);
  stalls_.BeginCall();
  state_.endpoints.timeout =
      call.timeout >= 0 ? call.timeout : state_.options.collective_timeout;
  state_.endpoints.stall_after =
      state_.endpoints.timeout > 0 ? std::min(1.0, state_.endpoints.timeout / 4) : 1.0;
  state_.endpoints.on_stall = [this, &call](double seconds,
                                            const std::vector<int>& peers, bool* end) {
    return stalls_.OnStall(call, seconds, peers, end);
  };
}

Status CallRunner::Compare(const Call& call, const Status& local_check, bool* refused) {
  Waiter waiter = state_.NewWaiter();
  Frame frame;
  Agreement agreement;
  log_.Enter();
  *refused = false;
  RJ_TRY(BeginAndAgree(call, local_check, &frame, &waiter, &agreement));
  *refused = agreement.refused;
  log_.Agreed();
  log_.OnDevice(call);
  log_.EndedAtAgreement(call, agreement.outcome.code());
  return agreement.outcome;
}

Status CallRunner::BeginAndAgree(const Call& call, const Status& local_check,
                                 Frame* frame, Waiter* waiter, Agreement* agreement) {
  RJ_TRY(Begin(call, frame));
  frame->fingerprint = Fingerprint(call);
  const Status status = AgreeOn(call, local_check, *frame, waiter, agreement);
  return status.ok() ? status : failures_.Fail(call, status);
}

Status CallRunner::Run(const Call& call, CallAttempt* attempt,
                       const Status* local_check, bool negotiated) {
  const Status status = RunSteps(call, attempt, local_check, negotiated);
  if (!attempt->locally_complete) completion_.EndFailed(attempt);
  return status;
}

Status CallRunner::RunSteps(const Call& call, CallAttempt* attempt,
                            const Status* local_check, bool negotiated) {
  log_.Enter();
  Waiter waiter = state_.NewWaiter();
  Frame frame;
  Agreement agreement;
  const Status valid =
      local_check && !local_check->ok() ? *local_check : Validate(call);
  Requests requests;
  if (valid.ok()) requests = Split(call, state_.rank(), state_.size());
  agreement.even = call.even;
  const bool exact = call.op == Collective::kExchange;
  const bool inlined = planner_.IsInline(requests);
  using Source = CallAttempt::Source;
  if (inlined && !state_.options.end_barrier) attempt->source = Source::kInlineData;
  if (valid.ok() && requests.empty() && !exact && !state_.options.end_barrier)
    attempt->source = Source::kNotNeeded;
  // `agreed` stays 0 for an alltoall, because its ranks may agree twice, and the
  // counter would reach the value in the first agreement.
  SharedSegment* const segment = state_.endpoints.segment.get();
  if (segment && attempt->source != Source::kNone && call.op != Collective::kAlltoall)
    attempt->agreed = state_.endpoints.segment->own(SharedSegment::kAgreed) + 1;
  if (inlined)
    PutInline(requests[0].problem, requests[0].arithmetic, requests[0].in,
              state_.endpoints);
  agreement.splits_inline = inlined;
  if (negotiated && valid.ok() && !inlined)
    RJ_TRY(Begin(call, &frame));
  else
    RJ_TRY(BeginAndAgree(call, valid, &frame, &waiter, &agreement));
  log_.Agreed();
  for (Request& request : requests) request.problem.even = agreement.even;
  if (agreement.outcome.ok()) {
    if (Status s = AtFailpoint(Failpoint::kAgreed); !s.ok())
      return failures_.Fail(call, s);
    if (inlined) RJ_TRY(CompleteInline(call, &requests, &agreement.outcome, attempt));
  }
  if (!agreement.outcome.ok()) {
    log_.EndedAtAgreement(call, agreement.outcome.code());
    return completion_.End(call, agreement.outcome, CallCompletion::Barrier::kFrames,
                           frame, &waiter, attempt);
  }
  if (state_.repairs && (exact || !requests.empty())) {
    state_.progress->set_repeatable(local_check || call.KeepsInputs());
    if (requests.size() == 1 && !state_.options.end_barrier)
      attempt->reduced = planner_.RetainedWhenReducedIs(requests[0]);
    if (attempt->reduced > 0) attempt->source = Source::kTileResults;
  }
  if (Status s = AgreeOnSegments(call.op, frame, &waiter); !s.ok())
    return failures_.Fail(call, s);
  CallCompletion::Barrier barrier = CallCompletion::Barrier::kNone;
  const auto tiles_finished = [&] {
    return segment ? segment->own(SharedSegment::kFinished) : 0;
  };
  if (exact) {
    if (Status s = RunExchange(call, &frame, &waiter); !s.ok())
      return failures_.Fail(call, s);
    barrier = CallCompletion::Barrier::kFrames;
  }
  for (Request& request : requests) {
    const uint64_t before = tiles_finished();
    if (Status s = RunRequest(&request, frame, &waiter); !s.ok())
      return failures_.Fail(call, s);
    barrier = tiles_finished() != before ? CallCompletion::Barrier::kFinished
                                         : CallCompletion::Barrier::kFrames;
    ++frame.step;
  }
  // If every rank can complete the call alone, no rank needs to wait until its peers
  // have their results.
  if (attempt->source != Source::kNone) barrier = CallCompletion::Barrier::kNone;
  RJ_TRY(completion_.End(call, OkStatus(), barrier, frame, &waiter, attempt));
  log_.Succeeded(call);
  return OkStatus();
}

Status CallRunner::CompleteInline(const Call& call, Requests* requests, Status* outcome,
                                  CallAttempt* attempt) {
  Request& request = requests->front();
  const Problem& problem = request.problem;
  const Arithmetic& arithmetic = request.arithmetic;
  Values values;
  bool whole = false;
  if (state_.options.end_barrier) state_.progress->set_repeatable(call.KeepsInputs());
  const Status read =
      ReadInline(problem, arithmetic, state_.endpoints, &values, &whole);
  if (read.code() == Code::kMismatch) *outcome = failures_.WithContext(call, read);
  if (!read.ok()) return outcome->ok() ? failures_.Fail(call, read) : OkStatus();
  if (!whole) {
    attempt->source = CallAttempt::Source::kNone;
    return OkStatus();
  }
  FinishInline(problem, arithmetic, values, state_.rank(), request.out);
  log_.Count(request, kShared, "inline", request.wire_bytes());
  requests->clear();
  return OkStatus();
}

Status CallRunner::AgreeOn(const Call& call, const Status& valid, const Frame& frame,
                           Waiter* waiter, Agreement* agreement) {
  agreement->refused = state_.size() == 1;
  if (state_.size() == 1) {
    agreement->outcome = valid.ok() ? valid : failures_.WithContext(call, valid);
    return OkStatus();
  }
  bool agreed = false, fit = valid.ok();
  Frame vote = frame;
  if (fit) vote.attached = EvenRows(call, state_.size());
  RJ_TRY(Agree(vote, fit, state_.endpoints, waiter, &agreed, &agreement->even));
  // Rows that are even on all ranks fit together.
  if (agreed && !agreement->even && call.op == Collective::kAlltoall &&
      !call.rows.empty() && !call.rows_known && !agreement->splits_inline) {
    RJ_TRY(CheckSplits(call, frame, waiter, &fit));
    RJ_TRY(Agree(frame, fit, state_.endpoints, waiter, &agreed));
    if (!agreed) {
      agreement->outcome = failures_.WithContext(
          call, {Code::kMismatch,
                 "splits and received_splits of the ranks do not fit together. "
                 "Nothing was exchanged."});
      return OkStatus();
    }
  }
  if (agreed) return OkStatus();
  std::vector<std::string> texts;
  const std::string own =
      valid.ok() ? Explain(call, kMaxText) : Refusal(valid.message());
  RJ_TRY(ExchangeTexts(frame, own, state_.endpoints, waiter, &texts));
  agreement->refused = std::all_of(texts.begin(), texts.end(), IsRefusal);
  if (valid.ok()) {
    int culprit = -1;
    std::string text =
        Mismatch(texts, state_.options.world_ranks, state_.options.name, &culprit);
    agreement->outcome = Status(Code::kMismatch, state_.Prefix() + text, culprit);
  } else {
    agreement->outcome = failures_.WithContext(call, valid);
  }
  return OkStatus();
}

Status CallRunner::AgreeOnSegments(Collective op, const Frame& frame, Waiter* waiter) {
  if (segments_agreed_ || op != Collective::kAllreduce) return OkStatus();
  segments_agreed_ = true;
  Topology& topology = state_.options.topology;
  if (!collective::HasEvenHierarchy(topology)) return OkStatus();
  const bool fits = state_.endpoints.host && state_.endpoints.host->fits();
  return Agree(frame, fits, state_.endpoints, waiter, &topology.segment);
}

Status CallRunner::RunRequest(Request* request, const Frame& frame, Waiter* waiter) {
  request->buffers.in = &request->in;
  request->buffers.out = &request->out;
  if (request->arithmetic.op == ReduceOp::kAdasum)
    return RunAdasum(request, frame, waiter);
  Result<const Planned*> planned = planner_.PlanFor(*request);
  if (!planned.ok()) return planned.status();
  const Route& route = planned.value()->route;
  const Plan& plan = planned.value()->plan;
  AddScratch(request, plan.scratch * Width(request->arithmetic.dtype));
  log_.Count(*request, route.algorithm->name, route.name(),
             plan.sent * Width(request->arithmetic.wire));
  if (route.kind == Route::Kind::kTiles) {
    bool could = true;
    RJ_TRY(RunInTiles(request->problem, request->buffers, request->arithmetic,
                      state_.endpoints, waiter, &could));
    if (could) return OkStatus();
  }
  const Status done =
      route.kind == Route::Kind::kRails
          ? ReduceOnRails(plan, request->problem, request->buffers, request->arithmetic,
                          frame, state_.endpoints, waiter)
          : Execute(plan, request->buffers, request->arithmetic, frame,
                    state_.endpoints, waiter);
  // A peer that has invalidated its exposed bytes is not to blame: the call has failed
  // on that peer, and the reason arrives on this rank as an abort a moment later.
  if (HasInvalidated(done.rank())) failures_.AwaitReason();
  return done;
}

bool CallRunner::HasInvalidated(int peer) const {
  Link* link = peer < 0 ? nullptr : state_.endpoints.links[peer].get();
  const CmaEndpoint* cma = link ? link->cma() : nullptr;
  return cma != nullptr && cma->invalidated();
}

void CallRunner::AddScratch(Request* request, uint64_t bytes) {
  if (scratch_.size() < bytes) scratch_.resize(bytes);
  request->buffers.scratch.Add(scratch_.data(), bytes);
}

Status CallRunner::RunAdasum(Request* request, const Frame& frame, Waiter* waiter) {
  const Arithmetic& a = request->arithmetic;
  const uint64_t elements =
      state_.size() > 1 ? AdasumScratch(request->problem.counts[0]) : 0;
  AddScratch(request, elements * Width(a.dtype));
  uint64_t sent = 0;
  const Status status = AllreduceAdasum(request->buffers, request->sizes, a, frame,
                                        state_.endpoints, waiter, &sent);
  log_.Count(*request, kAdasumName, kAdasumName, sent);
  return status;
}

// Repeats an exchange whose checksums do not fit, because most errors of memory or of a
// network do not occur twice. If the checksums do not fit again, one rank is to blame.
Status CallRunner::RunExchange(const Call& call, Frame* frame, Waiter* waiter) {
  constexpr int kMostTries = 4;
  ExactExchange exchange(call, state_.rank(), state_.size(), &exchange_memory_);
  Status blame;
  for (int tries = 0; tries < kMostTries && (tries < 2 || blame.ok()); ++tries) {
    bool fits = false;
    RJ_TRY(TryExchange(&exchange, frame, waiter, &fits));
    if (fits) return exchange.Finish(), OkStatus();
    RJ_TRY(FindDamage(&exchange, *frame, waiter, &blame));
    ReportFault(call, blame);
  }
  if (!blame.ok()) return blame;
  return {Code::kInternal, "could not make an exchange whose checksums fit"};
}

// Warns of a machine that may be about to fail. If no rank is to blame, each rank
// counts the fault, because each may have caused it, and rank 0 reports it.
void CallRunner::ReportFault(const Call& call, const Status& blame) const {
  const bool known = !blame.ok();
  if (known && blame.rank() != state_.rank()) return;
  log_.CountFault(call);
  if (!known && state_.rank() != 0) return;
  const std::string what = known ? "this rank " + blame.message()
                                 : "its checksums do not fit, and no rank knows why";
  std::fprintf(stderr, "[ringjax %d/%d e%u] %s: %s\n", state_.world_rank(),
               state_.size(), state_.options.epoch,
               failures_.DescribeCall(call).c_str(), what.c_str());
}

// Runs all steps of an exchange once. All ranks receive the same `*fits`.
Status CallRunner::TryExchange(ExactExchange* exchange, Frame* frame, Waiter* waiter,
                               bool* fits) {
  exchange->Begin();
  Request whole = exchange->Whole();
  bool in_tiles = false;
  RJ_TRY(GoesInTiles(whole, &in_tiles));
  if (in_tiles) {
    const Planned& planned = *planner_.PlanFor(whole).value();
    // Each element is sent as 8 bytes to be reduced, and then as 4 bytes.
    log_.Count(whole, planned.route.algorithm->name, planned.route.name(),
               planned.plan.sent * 6);
    RJ_TRY(ExchangeInTiles(whole.problem.counts[0], {&whole.in, &whole.out, {}},
                           whole.arithmetic, exchange, state_.endpoints, waiter));
  } else {
    Request scatter = exchange->Scatter();
    RJ_TRY(RunRequest(&scatter, *frame, waiter));
    exchange->DecodeBlock();
  }
  ++frame->step;
  Request gather = exchange->Gather(!in_tiles);
  RJ_TRY(RunRequest(&gather, *frame, waiter));
  ++frame->step;
  *fits = exchange->Fits(!in_tiles);
  if (state_.size() == 1) return OkStatus();
  return Agree(*frame, *fits, state_.endpoints, waiter, fits);
}

Status CallRunner::GoesInTiles(const Request& whole, bool* in_tiles) {
  if (!state_.endpoints.segment || whole.in.empty()) return OkStatus();
  const Result<const Planned*> planned = planner_.PlanFor(whole);
  if (!planned.ok()) return planned.status();
  *in_tiles = planned.value()->route.kind == Route::Kind::kTiles;
  return OkStatus();
}

// Finds the rank to blame for an exchange whose checksums do not fit. All ranks receive
// the same `*blame`, which is ok if no rank finds anything wrong with itself.
Status CallRunner::FindDamage(ExactExchange* exchange, const Frame& frame,
                              Waiter* waiter, Status* blame) {
  const Request whole = exchange->Whole();
  bool in_tiles = false;
  RJ_TRY(GoesInTiles(whole, &in_tiles));
  std::vector<std::vector<PartOfSums>> parts;
  for (int rank = 0; rank < state_.size() && in_tiles; ++rank)
    parts.push_back(PartsInTiles(whole.problem.counts[0], whole.arithmetic,
                                 state_.endpoints, rank));
  std::vector<int64_t> terms = exchange->ChecksOf(parts);
  if (state_.size() > 1)
    RJ_TRY(ExchangeWords(frame, terms, state_.endpoints, waiter, &terms));
  const std::string own = exchange->Complaint(terms);
  std::vector<std::string> texts = {own};
  if (state_.size() > 1)
    RJ_TRY(ExchangeTexts(frame, own, state_.endpoints, waiter, &texts));
  *blame = OkStatus();
  std::string_view worst;
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    if (texts[rank].empty() || (!worst.empty() && texts[rank] >= worst)) continue;
    worst = texts[rank];
    *blame = {Code::kInternal, texts[rank].substr(1), static_cast<int>(rank)};
  }
  return OkStatus();
}

// Exchanges the splits of an alltoall before any row is sent. Sets `*fit` to whether
// every peer sends the number of rows that this rank expects.
Status CallRunner::CheckSplits(const Call& call, const Frame& frame, Waiter* waiter,
                               bool* fit) const {
  const size_t p = static_cast<size_t>(state_.size()), n = call.tensors.size();
  std::vector<int64_t> sent(p * n), coming(p * n), expected(p * n);
  for (size_t i = 0; i < n; ++i) {
    const auto rows = RowsOf(call, i, 2 * p);
    for (size_t r = 0; r < p; ++r) {
      sent[r * n + i] = rows[r];
      expected[r * n + i] = rows[p + r];
    }
  }
  RJ_TRY(ExchangeWords(frame, sent, state_.endpoints, waiter, &coming));
  *fit = coming == expected;
  return OkStatus();
}

}  // namespace ringjax
