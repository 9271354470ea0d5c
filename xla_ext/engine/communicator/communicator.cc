// See communicator.h.
#include "engine/communicator/communicator.h"

#include "engine/communicator/resilient_comm.h"

namespace ringjax {

Communicator::Communicator(CommunicatorOptions options,
                           std::vector<std::unique_ptr<Link>> links,
                           std::unique_ptr<Doorbell> doorbell,
                           std::unique_ptr<SharedSegment> segment,
                           std::shared_ptr<ResilientComm> resilient)
    : state_(std::move(options), std::move(links), std::move(doorbell),
             std::move(segment), std::move(resilient)) {}

Communicator::~Communicator() {
  Abort(Status(Code::kUnavailable, "the communicator was shut down"));
}

// -- calls ---------------------------------------------------------------------------

Status Communicator::RunLastOfChain(uint64_t ticket, std::vector<ChainedCall>* chain) {
  if (Continues()) return state_.resilient->RunLastOfChain(*this, ticket, chain);
  return RunInTurn(ticket, *chain->back().call, &chain->back().epoch);
}

uint64_t Communicator::TakeTicket() {
  return Continues() ? state_.resilient->TakeTicket() : state_.ticket_lock.Take();
}

Status Communicator::Run(const Call& call, uint32_t* epoch) {
  return RunInTurn(TakeTicket(), call, epoch);
}

Status Communicator::RunInTurn(uint64_t ticket, const Call& call, uint32_t* epoch) {
  if (Continues()) return state_.resilient->Run(*this, ticket, call, epoch);
  if (epoch) *epoch = state_.options.epoch;
  return runner_.InTurn(ticket, call, [&] {
    CallAttempt attempt;
    return runner_.Run(call, &attempt);
  });
}

Status Communicator::RunNegotiated(const Call& call) {
  return runner_.InTurn(state_.ticket_lock.Take(), call, [&] {
    CallAttempt attempt;
    return runner_.Run(call, &attempt, nullptr, true);
  });
}

Status Communicator::Compare(const Call& call, const Status& fits, bool* refused) {
  return runner_.InTurn(state_.ticket_lock.Take(), call,
                        [&] { return runner_.Compare(call, fits, refused); });
}

// -- as an epoch of a ResilientComm --------------------------------------------------

void Communicator::OnInstalled(uint64_t epoch_index) {
  state_.progress->Installed();
  epoch_index_.store(epoch_index, std::memory_order_release);
}

Status Communicator::Attempt(const Call& call, CallAttempt* attempt) {
  attempt->sequence = state_.progress->begun() + 1;
  return runner_.Guarded(call, [&] { return runner_.Run(call, attempt); });
}

Status Communicator::RunInThisEpoch(const Call& call, const Status& fits) {
  CallAttempt attempt;
  if (!Continues())
    return runner_.InTurn(state_.ticket_lock.Take(), call,
                          [&] { return runner_.Run(call, &attempt, &fits); });
  const Status status = runner_.InTurn(state_.ticket_lock.Take(), call, [&] {
    attempt.sequence = state_.progress->begun() + 1;
    return runner_.Run(call, &attempt, &fits);
  });
  if (attempt.globally_complete) return status;
  // Sequence 0: the call did not begin. Its number would have been the next one.
  if (attempt.sequence == 0) attempt.sequence = state_.progress->begun() + 1;
  const Status decision = state_.resilient->Judge(epoch_index(), attempt.sequence);
  return decision.ok() ? completion_.CompleteCommitted(call, attempt)
                       : WithContext(call, decision);
}

Status Communicator::CompleteCommitted(const Call& call, const CallAttempt& attempt) {
  return completion_.CompleteCommitted(call, attempt);
}

Status Communicator::Quiesce(double seconds, ProgressReport* standing) {
  if (!aborted())
    return Status(Code::kFailedPrecondition, Prefix() + "quiesce comes after abort");
  if (!state_.progress)
    return Status(Code::kFailedPrecondition, Prefix() + "it is not resilient");
  if (!state_.progress->Settled(seconds))
    return Status(Code::kDeadlineExceeded, Prefix() + "a call has not stopped within " +
                                               std::to_string(seconds) +
                                               " s after the abort");
  *standing = state_.progress->Read();
  return OkStatus();
}

// -- diagnostics ---------------------------------------------------------------------

void Communicator::SetCostModel(const CostModel& cost, const std::string& algorithm,
                                bool trial) {
  const auto set = [&] {
    state_.options.cost = cost;
    state_.options.algorithm = algorithm;
    planner_.Clear();
    log_.Restart(trial);
  };
  if (Continues()) return state_.resilient->Between(set);
  const auto stop = [this] { return aborted() ? abort_status() : OkStatus(); };
  if (!state_.ticket_lock.Wait(state_.ticket_lock.Take(), stop).ok())
    return;  // aborted: no call follows that could use the cost model
  const TicketLockGuard here(&state_.ticket_lock);
  set();
}

std::map<std::string, int> Communicator::transports() const {
  std::map<std::string, int> all;
  for (const auto& link : state_.endpoints.links)
    if (link) ++all[std::string(link->transport())];
  return all;
}

}  // namespace ringjax
