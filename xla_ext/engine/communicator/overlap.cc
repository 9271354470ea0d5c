// Implements Overlap: START, DONE and the engine thread that runs the calls. See
// overlap.h.
#include "engine/communicator/overlap.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>

#include "engine/communicator/resilient_comm.h"

namespace ringjax {
namespace {

uint64_t RoundUp(uint64_t bytes) {
  return (bytes + Overlap::kAlign - 1) / Overlap::kAlign * Overlap::kAlign;
}

}  // namespace

Overlap::Overlap(std::shared_ptr<Communicator> communicator)
    : communicator_(std::move(communicator)) {}

Overlap::~Overlap() {
  communicator_->Abort(Status(Code::kUnavailable, Communicator::kShutDown));
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  if (worker_.joinable()) worker_.join();
}

template <typename Stale>
void Overlap::AbortIf(Stale&& stale, std::unique_lock<std::mutex>* lock) {
  const bool found = std::any_of(jobs_.begin(), jobs_.end(), [&](const auto& entry) {
    return (entry.second->pending || entry.second->copied) && stale(entry.first);
  });
  if (!found) return;
  // Only the peers have applied the results of these jobs, so replicas would diverge.
  const auto communicator = communicator_;
  lock->unlock();
  communicator->AbortAndNotifyPeers(
      Code::kUnavailable,
      "started a step and never collected the results of the one "
      "before, which failed between START and DONE");
  lock->lock();
  ReleaseWhenDone([](int64_t) { return true; }, lock);
}

template <typename Old>
void Overlap::ReleaseWhenDone(Old&& old, std::unique_lock<std::mutex>* lock) {
  // Waits for all jobs before it releases any, because a job that runs may run earlier
  // jobs of its chain again.
  changed_.wait(*lock, [&] {
    return std::all_of(jobs_.begin(), jobs_.end(), [&](const auto& entry) {
      const Job& job = *entry.second;
      return !old(entry.first) || (!job.copied && (!job.pending || job.finished));
    });
  });
  for (auto& [site, job] : jobs_)
    if (old(site)) Release(job.get());
}

void Overlap::Follow(std::shared_ptr<Communicator> next) {
  std::lock_guard lock(mutex_);
  std::swap(communicator_, next);
}

void Overlap::Begin(int64_t site) {
  std::unique_lock lock(mutex_);
  const auto old = [site](int64_t other) { return ChainOf(other) == ChainOf(site); };
  if (failed_.erase(ChainOf(site)) > 0) ReleaseWhenDone(old, &lock);
  AbortIf(old, &lock);
}

Status Overlap::Start(const Call& call, int64_t site, uint64_t in_flight) {
  for (const Tensor& t : call.tensors)
    if (t.room != t.bytes()) return SizeError(call, site);
  std::unique_lock lock(mutex_);
  AbortIf([site](int64_t other) { return other == site; }, &lock);
  std::unique_ptr<Job>& slot = jobs_[site];
  if (!slot) slot = std::make_unique<Job>();
  Job* job = slot.get();
  SetJob(call, site, in_flight, job);
  job->epoch = 0;
  if (!worker_.joinable()) worker_ = std::thread([this] { RunQueue(); });
  job->copied = true;
  lock.unlock();
  for (size_t i = 0; i < call.tensors.size(); ++i) {
    const Tensor& from = call.tensors[i];
    if (from.bytes() > 0) std::memcpy(job->call.tensors[i].in, from.in, from.bytes());
  }
  lock.lock();
  job->copied = job->finished = false;
  queue_.push_back(job);
  // The ticket is taken last, after all steps that can throw, because an unused ticket
  // would block all later calls.
  job->pending = true;
  job->ticket = communicator_->TakeTicket();
  lock.unlock();
  changed_.notify_all();
  return OkStatus();
}

void Overlap::SetJob(const Call& call, int64_t site, uint64_t in_flight, Job* job) {
  uint64_t bytes = 0;
  for (const Tensor& t : call.tensors) bytes += RoundUp(t.bytes());
  // If another epoch may follow, all buckets of a chain may have to run again there, so
  // their inputs are kept in addition to their results.
  const bool again = communicator_->resilient()->repairs();
  const uint64_t copies = again ? 2 : 1;
  job->unit = again ? ChainOf(site) : ~site;
  job->name = call.name;
  job->names = call.names;
  job->partition = call.partition;
  job->call = call;
  job->call.overlapped = true;
  job->call.name = job->name;
  job->call.names = job->names;
  job->call.partition = job->partition;
  Release(job);  // the memory of a START that failed
  arena_.Grow(copies * in_flight);
  job->block = arena_.Take(copies * bytes);
  // The arena has no room if two programs run at once, or if the system has no memory.
  // `new` leaves the bytes unwritten; make_unique would write zeros.
  if (!job->block) job->beyond.reset(new std::byte[copies * bytes]);
  std::byte* at = job->block ? job->block : job->beyond.get();
  for (Tensor& t : job->call.tensors) {
    t.in = at;
    t.out = at + (copies - 1) * bytes;
    t.room = t.bytes();
    at += RoundUp(t.bytes());
  }
}

double Overlap::exposed() const {
  std::lock_guard lock(mutex_);
  return exposed_;
}

void Overlap::Release(Job* job) {
  if (job->block) arena_.Give(job->block);
  job->block = nullptr;
  job->beyond.reset();
  job->pending = false;
}

Status Overlap::Done(const Call& call, int64_t site) {
  std::unique_lock lock(mutex_);
  auto found = jobs_.find(site);
  if (found == jobs_.end() || !found->second->pending)
    return Status(Code::kFailedPrecondition,
                  communicator_->Prefix() + "DONE of bucket " + std::to_string(site) +
                      " of '" + std::string(call.name) + "' without its START");
  Job* job = found->second.get();
  Status status = Wait(job, &lock);
  bool fits = call.tensors.size() == job->call.tensors.size();
  for (size_t i = 0; fits && i < call.tensors.size(); ++i)
    fits = call.tensors[i].room == job->call.tensors[i].room &&
           call.tensors[i].bytes() == job->call.tensors[i].room;
  if (status.ok() && !fits) status = SizeError(call, site);
  if (status.ok()) {
    // Release the lock while copying, because the engine thread needs it for the next
    // bucket.
    job->copied = true;
    lock.unlock();
    for (size_t i = 0; i < call.tensors.size(); ++i) {
      const Tensor& to = call.tensors[i];
      if (to.bytes() > 0) std::memcpy(to.out, job->call.tensors[i].out, to.bytes());
    }
    lock.lock();
    job->copied = false;
    changed_.notify_all();
  }
  Release(job);
  return status;
}

bool Overlap::IsFinal(const Job& job) const {
  return std::all_of(jobs_.begin(), jobs_.end(), [&job](const auto& entry) {
    const Job& other = *entry.second;
    return other.unit != job.unit || !other.pending || other.finished;
  });
}

// Waits until the results of `job` are final, and returns the status of its call.
// Checks for an interrupt ten times a second; an interrupt aborts the communicator.
Status Overlap::Wait(Job* job, std::unique_lock<std::mutex>* lock) {
  const auto start = Clock::now();
  while (!IsFinal(*job)) {
    changed_.wait_for(*lock, std::chrono::milliseconds(100));
    if (!IsFinal(*job)) {
      const auto communicator = communicator_;
      lock->unlock();
      if (Interrupted())
        communicator->AbortAndNotifyPeers(Code::kCancelled,
                                          "was interrupted between START and DONE");
      lock->lock();
    }
  }
  exposed_ += std::chrono::duration<double>(Clock::now() - start).count();
  if (!job->status.ok()) failed_.insert(job->unit);
  return job->status;
}

Status Overlap::SizeError(const Call& call, int64_t site) const {
  return Status(Code::kInvalidArgument,
                communicator_->Prefix() + "bucket " + std::to_string(site) + " of '" +
                    std::string(call.name) + "': results and tensors differ in size");
}

void Overlap::RunQueue() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
    if (queue_.empty()) return;
    RunNext(&lock);
  }
}

// Runs the oldest queued bucket. If this bucket completes in a later epoch than
// finished buckets of its unit, RunLastOfChain runs those buckets again. If a run
// fails, all buckets of the unit fail.
void Overlap::RunNext(std::unique_lock<std::mutex>* lock) {
  Job* const job = queue_.front();
  queue_.pop_front();
  const auto communicator = communicator_;
  std::vector<Job*> step;  // finished jobs of the unit, then `job`
  std::vector<Communicator::ChainedCall> pieces;
  for (const auto& [site, other] : jobs_)
    if (other->unit == job->unit && other->pending && other->finished)
      step.push_back(other.get());
  step.push_back(job);
  for (const Job* each : step) pieces.push_back({&each->call, each->epoch});
  lock->unlock();
  Status status;
  try {
    status = communicator->RunLastOfChain(job->ticket, &pieces);
  } catch (const std::exception& e) {
    status = Status(Code::kInternal, communicator->Prefix() + e.what());
  }
  lock->lock();
  job->status = OkStatus();
  job->finished = true;
  for (size_t i = 0; i < step.size(); ++i) {
    step[i]->epoch = pieces[i].epoch;
    if (!status.ok()) step[i]->status = status;
  }
  changed_.notify_all();
}

}  // namespace ringjax
