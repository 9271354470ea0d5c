// Implements ProgressEngine: turns and rounds, data sent with a round, and the move to
// the next epoch. See progress_engine.h.
#include "engine/eager/progress_engine.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <functional>
#include <mutex>
#include <string>
#include <utility>

namespace ringjax {
ProgressEngine::ProgressEngine(LaneState& state, TaskQueue& tasks, LaneRecord& record)
    : state_(state),
      communicator_(state.communicator),
      tasks_(tasks),
      record_(record),
      runner_(state, tasks, record),
      stalls_(state),
      negotiation_(std::make_unique<Negotiation>(ForNegotiation())) {}

NegotiationOptions ProgressEngine::ForNegotiation() {
  NegotiationOptions n;
  n.rank = communicator_->rank();
  n.size = communicator_->size();
  n.members = communicator_->options().world_ranks;
  n.fusion_threshold = state_.options.fusion_threshold;
  n.cache_capacity = state_.options.cache_capacity;
  n.prefix = communicator_->Prefix();
  n.on_submission = [this](const Submission& s, int first, int end) {
    record_.Submitted(s, first, end);
  };
  return n;
}

Status ProgressEngine::Turn(Clock::time_point until, bool takes_submissions) {
  if (takes_submissions) TakeSubmissions();
  if (stalls_.IsDue()) stalls_.Watch(negotiation_.get());
  if (negotiation_->HasItems()) {
    RJ_TRY(AwaitMore());
    return Round();
  }
  bool begun = false, required;
  {
    std::lock_guard lock(state_.mutex);
    required = tasks_.pending();
  }
  RJ_TRY(communicator_->rounds().AwaitNext(std::min(until, stalls_.next_look()),
                                           required, &begun));
  if (!begun) return OkStatus();
  TakeSubmissions();
  return Round();
}

void ProgressEngine::TakeSubmissions() {
  const bool joins = tasks_.Take(&taken_);
  for (TaskPtr& task : taken_) {
    stalls_.OnTaken(*task);
    negotiation_->Submit(std::move(task));
  }
  taken_.clear();
  if (joins) negotiation_->Join();
}

// Waits for more submissions to fuse, until cycle_seconds have passed or a peer begins
// the round.
Status ProgressEngine::AwaitMore() {
  if (state_.options.cycle_seconds <= 0) return OkStatus();
  const auto until = Clock::now() + ToDuration(state_.options.cycle_seconds);
  for (bool begun = false; !begun && Clock::now() < until;) {
    RJ_TRY(communicator_->rounds().AwaitNext(until, true, &begun));
    TakeSubmissions();
  }
  return OkStatus();
}

Status ProgressEngine::Round() {
  record_.BeginRound();
  Piggyback piggyback = OfferData();
  const std::string message = negotiation_->TakeMessage();
  const uint64_t first_id = negotiation_->next_id();
  RJ_TRY(communicator_->rounds().Exchange(message, &messages_, &piggyback));
  decisions_.clear();
  if (Status s = negotiation_->Receive(messages_, &decisions_); !s.ok()) {
    communicator_->AbortAndNotifyPeers(s.code(), s.message(), s.rank());
    return s;
  }
  ++state_.stats.rounds;
  state_.stats.message_bytes += message.size();
  state_.stats.cached = hits_before_ + negotiation_->hits();
  // A rank that sends data with a round submits only one operation in that round. So if
  // all ranks have sent data, and the only decision runs one new operation, the data
  // belong to that operation.
  const bool come = piggyback.whole && RunOneNew(decisions_, first_id);
  const Piggyback* values = come ? &piggyback : nullptr;
  RJ_TRY(runner_.RunAll(decisions_, values));
  decisions_.clear();
  stalls_.EndRound(negotiation_->pending() > 0);
  return OkStatus();
}

void ProgressEngine::FailAll(const Status& cause) {
  const std::vector<TaskPtr> tasks = tasks_.Fail(cause);
  record_.Report(tasks, {}, cause);
  const auto& recorder = communicator_->options().recorder;
  if (recorder && cause.rank() >= 0) recorder->Dump(cause.message());
  for (const TaskPtr& task : tasks)
    tasks_.Finish({&task, 1}, state_.WithContext(task->Describe(), cause), nullptr);
  tasks_.FinishJoin(state_.WithContext(kJoinTitle, cause), -1);
}

// -- piggybacked data ----------------------------------------------------------------
//
// A rank that submits one short operation and nothing else sends the data of that
// operation together with the round that negotiates it. If all other ranks submit the
// same operation and nothing else, every rank has all data after the round, and the
// call, which would be a second exchange, is skipped. So in a program that waits for
// each of its operations, most operations take one exchange. In all other cases, a few
// KiB are copied in vain.

namespace {

// The most bytes that a rank sends with a round. Copying more bytes in vain would take
// too long.
constexpr uint64_t kMaxPiggyback = 8 << 10;
// The limit if the caller waits for the operation and it is no allreduce. Then the
// other ranks probably submit the same operation, so the copy is probably not made in
// vain.
constexpr uint64_t kMaxPiggybackIfWaits = 64 << 10;

// Returns whether an operation may send its data with the round: it is short, and each
// rank can compute the same bits as a call does from the inputs of all ranks.
bool Qualifies(const Submission& s, bool waits) {
  const uint64_t most =
      waits && s.op != Collective::kAllreduce ? kMaxPiggybackIfWaits : kMaxPiggyback;
  if (s.cuda || s.tensors.size() != 1 || s.tensors[0].bytes() > most) return false;
  switch (s.op) {
    case Collective::kAllreduce:
    case Collective::kReducescatter:
      return s.prescale == 1 && s.reduce_op != ReduceOp::kAdasum;
    case Collective::kBroadcast:
    case Collective::kAllgather:
      return true;
    case Collective::kAlltoall:
      return s.splits.empty();
    case Collective::kBarrier:
    case Collective::kExchange:
      break;
  }
  return false;
}

bool ShareMemory(const std::byte* a, uint64_t a_bytes, const std::byte* b,
                 uint64_t b_bytes) {
  return std::less<>()(a, b + b_bytes) && std::less<>()(b, a + a_bytes);
}

// For an alltoall or reducescatter, excludes from the copy the rows that only this rank
// needs, unless the result overwrites the input.
void ExcludeOwnShare(const Submission& s, const void* out, int rank, int size,
                     Piggyback* piggyback) {
  if (s.op != Collective::kAlltoall && s.op != Collective::kReducescatter) return;
  const uint64_t bytes = piggyback->own.size();
  if (bytes == 0 ||
      ShareMemory(piggyback->own.data(), bytes, static_cast<const std::byte*>(out),
                  ResultBytes(s, 0, rank, size)))
    return;
  const int64_t rows = s.tensors[0].dims[0];
  int64_t before = 0;
  for (int r = 0; r < rank; ++r) before += ShareOf(rows, r, size);
  const uint64_t row = bytes / static_cast<uint64_t>(rows);
  piggyback->kept_begin = static_cast<uint64_t>(before) * row;
  piggyback->kept_end = static_cast<uint64_t>(before + ShareOf(rows, rank, size)) * row;
}

}  // namespace

Piggyback ProgressEngine::OfferData() const {
  Piggyback piggyback;
  const auto* task = static_cast<const Task*>(negotiation_->OnlySubmission());
  if (!task || !Qualifies(*task, task->waits) ||
      !communicator_->rounds().CanPiggyback(task->op))
    return piggyback;
  piggyback.given = true;
  piggyback.all.reserve(static_cast<size_t>(communicator_->size()));
  if (task->op != Collective::kBroadcast || task->root == communicator_->rank())
    piggyback.own = {static_cast<const std::byte*>(task->ins[0]),
                     task->tensors[0].bytes()};
  ExcludeOwnShare(*task, task->outs.empty() ? nullptr : task->outs[0],
                  communicator_->rank(), communicator_->size(), &piggyback);
  return piggyback;
}

// -- epochs --------------------------------------------------------------------------
//
// An operation that ended in the last epoch has the same outcome on all remaining ranks
// (DecisionRunner::ConfirmRound). Each rank submits its other operations again, in
// their original order, to a new negotiation, because no rank knows which messages of
// the last round the other ranks have received. If the new ranks cannot run an
// operation, only that operation fails.

namespace {

// Returns whether no rank was lost, added or renumbered. ranks[r] is the new rank of
// the old rank r, and `size` the number of new ranks.
bool RanksUnchanged(const std::vector<int>& ranks, int size) {
  if (ranks.size() != static_cast<size_t>(size)) return false;
  for (int r = 0; r < size; ++r)
    if (ranks[static_cast<size_t>(r)] != r) return false;
  return true;
}

std::string RestartReason(const std::string& reason) {
  return "training starts again" + (reason.empty() ? "" : ": " + reason);
}

// Translates a task to the ranks of `present`, the communicator of the new epoch.
// Returns an error if the task cannot run there.
Status AdaptToRanks(Task* task, const Communicator& present) {
  const uint64_t index = present.epoch_index();
  const auto change = present.resilient()->Changes(task->epoch_index, index);
  const auto lost = [&](const std::string& what) {
    const std::string why = change.reason.empty() ? "" : " (" + change.reason + ")";
    return Status(Code::kUnavailable, what + why);
  };
  const std::string ranks = std::to_string(present.size()) + " ranks";
  if (!change.repeats) return Status(Code::kUnavailable, RestartReason(change.reason));
  if (task->cuda)
    return lost("NCCL has ended with the ranks that it joined; submit it again");
  if (std::exchange(task->epoch_index, index) == index) return OkStatus();
  if (RanksUnchanged(change.ranks, present.size())) return OkStatus();
  if (task->op == Collective::kBroadcast) {
    const auto root = static_cast<size_t>(task->root);
    const int now = root < change.ranks.size() ? change.ranks[root] : -1;
    if (now < 0)
      return lost("root_rank " + std::to_string(task->root) +
                  " was lost; submit it again with a root among the " + ranks +
                  " that there are now");
    task->root = now;
  }
  if (task->op == Collective::kReducescatter)
    return lost(
        "its result was made for another number of ranks; submit it again for " +
        ranks);
  if (!task->splits.empty())
    return lost(
        "its splits are for ranks that there were before; submit it again with "
        "splits for " +
        ranks);
  if (Status s = CheckSubmission(*task, present.size()); !s.ok())
    return lost("it cannot be done by the " + ranks +
                " that there are now: " + s.message());
  return OkStatus();
}

}  // namespace

Status ProgressEngine::MoveToNextEpoch() {
  try {
    const Status cause = communicator_->abort_status();
    // After another error, such as an interrupt of this rank, no epoch follows.
    if (cause.code() != Code::kUnavailable) return cause;
    // After the swap below, `next` holds the ended communicator, which is therefore
    // destroyed without the mutex.
    std::shared_ptr<Communicator> next;
    RJ_TRY(state_.resilient->AwaitNextEpoch(communicator_->epoch_index(), &next));
    std::shared_ptr<EagerBackend> before;  // closed below, without the mutex
    PendingTasks all;
    {
      std::lock_guard lock(state_.mutex);
      state_.communicator.swap(next);
      before = state_.cuda;
      if (state_.cuda) state_.cuda = state_.make_cuda(communicator_);
      all = tasks_.CollectPending(communicator_->epoch_index());
    }
    if (before) before->Close();
    // If EagerLane::Abort ran before the swap above, it aborted only the ended
    // communicator, so the new one is aborted here.
    const Status end = state_.resilient->end_status();
    if (!end.ok()) communicator_->Abort(end);
    if (end.ok()) SubmitAgain(all, cause.rank());
    return end;
  } catch (const std::exception& e) {  // out of memory, most likely
    const std::string what = std::string("failed: ") + e.what();
    communicator_->AbortAndNotifyPeers(Code::kInternal, what);
    return Status(Code::kInternal, what);
  }
}

// Submits all pending operations to a new negotiation. `culprit` is the lost rank that
// ended the last epoch.
void ProgressEngine::SubmitAgain(const PendingTasks& all, int culprit) {
  hits_before_ += negotiation_->hits();
  negotiation_ = std::make_unique<Negotiation>(ForNegotiation());
  stalls_.Clear();
  taken_.clear();
  for (const TaskPtr& task : all.tasks) {
    Status status = AdaptToRanks(task.get(), *communicator_);
    if (status.ok()) {
      negotiation_->Submit(task);
      continue;
    }
    status = state_.WithContext(task->Describe(),
                                Status(status.code(), status.message(), culprit));
    record_.Failed(*task, status.message());
    tasks_.Finish({&task, 1}, status, nullptr);
  }
  if (!all.joins) return;
  const auto change =
      state_.resilient->Changes(all.join_epoch_index, communicator_->epoch_index());
  if (change.repeats) return negotiation_->Join();
  tasks_.FinishJoin(state_.WithContext(
                        kJoinTitle, {Code::kUnavailable, RestartReason(change.reason)}),
                    -1);
}

}  // namespace ringjax
