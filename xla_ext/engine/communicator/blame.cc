// How a communicator ends: who is to blame, what all ranks say about it. See
// communicator.h.
#include <algorithm>
#include <chrono>
#include <thread>

#include "engine/communicator/communicator.h"
#include "engine/communicator/succession.h"

namespace ringjax {

void Communicator::Abort(const Status& status) {
  {
    std::lock_guard lock(mutex_);
    if (abort_status_.ok()) abort_status_ = status;
  }
  aborted_.store(true, std::memory_order_seq_cst);  // see Progress
  doorbell_->Ring();
  turnstile_.WakeAll();
}

Status Communicator::abort_status() const {
  std::lock_guard lock(mutex_);
  return abort_status_;
}

void Communicator::AwaitAbort(std::chrono::milliseconds patience) const {
  const auto limit = std::chrono::steady_clock::now() + patience;
  while (!aborted() && std::chrono::steady_clock::now() < limit)
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
}

// A peer that has stopped is there, and tells the others, or the coordinator who tells
// this rank. To be blamed at once would end a rank that only starts again, where news
// take long.
void Communicator::AwaitNews() const { AwaitAbort(std::chrono::seconds(5)); }

// A link tells that a peer is gone; the heartbeat tells why, a moment later. So it may
// of one that left in good order: because another was lost before.
Status Communicator::Fail(const Call& call, const Status& cause) {
  if (cause.code() == Code::kUnavailable) AwaitAbort(std::chrono::milliseconds(200));
  const Status left = CheckLeft(entered());
  const bool explained =
      cause.code() == Code::kUnavailable && !left.ok() && left.rank() == cause.rank();
  const Status blame = Blame(call, explained ? left : cause);
  if (!aborted()) {
    End(blame);
  } else if (succession_ && cause.code() == Code::kCancelled) {
    // Whatever else has happened: this rank does not go on.
    succession_->End(Status(
        blame.code(), "rank " + std::to_string(blame.rank()) + " " + blame.message(),
        blame.rank()));
    return Named(call, succession_->end_status());
  }
  return Aborted(call);
}

// Who is to blame is known.
Status Communicator::Aborted(const Call& call) const {
  const Status reason = abort_status();
  // (Of a lane, what waits in it is still to be told.)
  const bool ends_job = !succession_ && !options_.named && reason.rank() >= 0;
  if (ends_job && options_.recorder) options_.recorder->Dump(reason.message());
  return Named(call, reason);
}

void Communicator::End(const Status& blame) {
  Code code = blame.code() == Code::kInternal ? Code::kUnavailable : blame.code();
  const bool own = blame.rank() == options_.members[rank()];
  // Without that rank a job that continues goes on.
  if (succession_ && !own) code = Code::kUnavailable;
  const Status status(code,
                      "rank " + std::to_string(blame.rank()) + " " + blame.message(),
                      blame.rank());
  Abort(status);
  if (const auto tell = hooks().on_failure) tell(blame);
  if (succession_ && own) succession_->End(status);
}

void Communicator::GiveUp(Code code, const std::string& what, int culprit) {
  const int world = culprit < 0 ? options_.members[rank()] : culprit;
  if (!aborted()) return End(Status(code, what, world));
  // Others go on in the next generation; this rank must not.
  if (succession_ && culprit < 0)
    succession_->End(Status(code, "rank " + std::to_string(world) + " " + what, world));
}

bool Communicator::PartTogether(double seconds) {
  const auto limit = Clock::now() + std::chrono::duration<double>(seconds);
  bool told = false;
  while (true) {
    const auto farewell = hooks().farewell.lock();
    if (!farewell) return true;  // there is nobody to agree with
    if (!std::exchange(told, true)) farewell->LetGo(id(), epoch());
    if (farewell->Holding(id(), epoch(), options_.members).empty()) return true;
    if (Clock::now() >= limit) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
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
    const std::vector<int> late = Late();
    if (!late.empty()) {
      world = late.front();
      what = "has not called " + Where(call);
    }
    what += " for " + Digits(lane_.timeout) + " s";
    for (size_t i = 1; i < late.size(); ++i)
      what += (i == 1 ? ", nor has rank " : ", rank ") + std::to_string(late[i]);
    const std::vector<Sighting> sightings =
        Sightings(late.empty() ? std::vector{world} : late);
    for (size_t i = 0; i < std::min(sightings.size(), kMostTold); ++i) {
      const std::string tale = Tale(sightings[i]);
      if (i == 0 && !sightings[i].host.empty())
        what = "on " + sightings[i].host + " " + what;
      if (!tale.empty())
        what += (i == 0 ? "; " : "; " + Title(sightings[i]) + ": ") + tale;
    }
  }
  return Status(cause.code(), what, world);
}

void Communicator::PeerLeft(int world_rank, uint64_t finished) {
  {
    std::lock_guard lock(mutex_);
    left_.emplace(world_rank, finished);
  }
  any_left_.store(true);
  doorbell_->Ring();
}

// Who has left is blamed for the calls that it has not finished, not for those in which
// others are still on their way.
Status Communicator::CheckLeft(uint64_t sequence) const {
  if (!any_left_.load()) return OkStatus();
  std::lock_guard lock(mutex_);
  const auto early =
      std::find_if(left_.begin(), left_.end(),
                   [sequence](const auto& left) { return left.second < sequence; });
  if (early == left_.end()) return OkStatus();
  const auto& members = options_.members;
  const auto at =
      std::find(members.begin(), members.end(), early->first) - members.begin();
  // What leads here most often: a loop over batches that is longer on one rank.
  return Status(Code::kUnavailable,
                "has shut down before this call (its program has ended, or called "
                "shutdown); have all ranks equally many batches?",
                static_cast<int>(at));
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
