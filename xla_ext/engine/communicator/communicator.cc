// Implements Communicator by delegating to its members. See communicator.h.
#include "engine/communicator/communicator.h"

#include <chrono>
#include <thread>

#include "engine/communicator/resilient_comm.h"

namespace ringjax {
namespace {

constexpr std::chrono::seconds kClosing(2);
constexpr std::chrono::microseconds kBetweenLooks(100);

// A peer that is still in the last call may not have received all bytes of this rank.
void CloseLinks(const std::vector<std::unique_ptr<Link>>& links) {
  const auto deadline = std::chrono::steady_clock::now() + kClosing;
  for (bool all = false; !all && std::chrono::steady_clock::now() < deadline;) {
    all = true;
    for (const auto& link : links) all &= !link || link->Close();
    if (!all) std::this_thread::sleep_for(kBetweenLooks);
  }
}

}  // namespace

Communicator::Communicator(CommunicatorOptions options,
                           std::vector<std::unique_ptr<Link>> links,
                           std::unique_ptr<Doorbell> doorbell,
                           std::unique_ptr<SharedSegment> segment,
                           std::shared_ptr<ResilientComm> resilient)
    : state_(std::move(options), std::move(links), std::move(doorbell),
             std::move(segment), std::move(resilient)) {}

Communicator::~Communicator() {
  Abort(Status(Code::kUnavailable, kShutDown));
  if (abort_status().message() == kShutDown) CloseLinks(state_.endpoints.links);
}

// -- running calls -------------------------------------------------------------------

ResilientComm& Communicator::order() const {
  return epoch_index() > 0 ? *state_.resilient : *state_.own;
}

Status Communicator::RunLastOfChain(uint64_t ticket, std::vector<ChainedCall>* chain) {
  return order().RunLastOfChain(*this, ticket, chain);
}

uint64_t Communicator::TakeTicket() { return order().TakeTicket(); }

Status Communicator::Run(const Call& call, uint32_t* epoch) {
  ResilientComm& present = order();
  return present.Run(*this, present.TakeTicket(), call, epoch);
}

Status Communicator::RunInTurn(uint64_t ticket, const Call& call, uint32_t* epoch) {
  return order().Run(*this, ticket, call, epoch);
}

Status Communicator::Compare(const Call& call, const Status& local_check,
                             bool* refused) {
  return runner_.InTurn(call,
                        [&] { return runner_.Compare(call, local_check, refused); });
}

// -- the interface of an epoch to its ResilientComm ----------------------------------

void Communicator::OnInstalled(uint64_t epoch_index) {
  state_.progress->Installed();
  // Release: a thread that sees the index, and runs calls in the order of `resilient`,
  // also sees that Progress numbers them from 1.
  epoch_index_.store(epoch_index, std::memory_order_release);
}

Status Communicator::Attempt(const Call& call, CallAttempt* attempt) {
  attempt->sequence = state_.progress->begun() + 1;
  const auto run = [&] { return runner_.Run(call, attempt); };
  return runner_.Guarded(call, std::ref(run));  // a copy would allocate memory
}

Status Communicator::RunInThisEpoch(const Call& call, const Status& local_check,
                                    bool negotiated) {
  CallAttempt attempt;
  // No other thread begins calls here, so the index of this call is known in advance.
  attempt.sequence = state_.progress->begun() + 1;
  const auto run = [&] {
    return runner_.Run(call, &attempt, &local_check, negotiated);
  };
  const Status status = runner_.InTurn(call, std::ref(run));
  if (attempt.globally_complete) return status;
  const Status decision = order().AwaitDecision(epoch_index(), attempt.sequence);
  return decision.ok() ? completion_.CompleteCommitted(call, attempt)
                       : WithContext(call, decision);
}

Status Communicator::Quiesce(double seconds, ProgressReport* report) {
  if (!aborted())
    return Status(Code::kFailedPrecondition, Prefix() + "quiesce comes after abort");
  if (!state_.progress->AwaitInactive(seconds))
    return Status(Code::kDeadlineExceeded, Prefix() + "a call has not stopped within " +
                                               std::to_string(seconds) +
                                               " s after the abort");
  *report = state_.progress->Read();
  return OkStatus();
}

// -- diagnostics and settings --------------------------------------------------------

void Communicator::SetCostModel(const CostModel& cost, const std::string& algorithm,
                                bool trial) {
  order().Between([&] {
    state_.options.cost = cost;
    state_.options.algorithm = algorithm;
    planner_.Clear();
    log_.Restart(trial);
  });
}

std::map<std::string, int> Communicator::transports() const {
  std::map<std::string, int> all;
  for (const auto& link : state_.endpoints.links)
    if (link) ++all[std::string(link->transport())];
  return all;
}

}  // namespace ringjax
