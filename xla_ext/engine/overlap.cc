// START, DONE and the thread between them. See overlap.h.
#include "engine/overlap.h"

#include <chrono>
#include <cstring>
#include <exception>

namespace ringjax {

Overlap::Overlap(std::shared_ptr<Communicator> communicator)
    : communicator_(std::move(communicator)) {}

Overlap::~Overlap() {
  communicator_->Abort(Status(Code::kUnavailable, "the communicator was shut down"));
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  if (worker_.joinable()) worker_.join();
}

Status Overlap::Start(const Call& call, int64_t site, bool first) {
  for (const Tensor& t : call.tensors)
    if (t.room != t.bytes()) return Unfit(call, site);
  std::unique_lock lock(mutex_);
  bool stale = false;
  for (auto& [s, job] : jobs_)
    stale |= job->pending && (s == site || (first && ChainOf(s) == ChainOf(site)));
  if (stale) {
    // Our peers applied that step and this rank did not: going on would diverge.
    lock.unlock();
    communicator_->GiveUp(Code::kUnavailable,
                          "started a step and never collected the results of the one "
                          "before, which failed between START and DONE");
    lock.lock();
    for (auto& [s, job] : jobs_) {
      changed_.wait(lock, [&] { return !job->pending || job->finished; });
      job->pending = false;
    }
  }
  std::unique_ptr<Job>& slot = jobs_[site];
  if (!slot) slot = std::make_unique<Job>();
  Job* job = slot.get();
  Pack(call, job);
  if (!worker_.joinable()) worker_ = std::thread([this] { Work(); });
  queue_.push_back(job);
  // The ticket comes last: nothing may fail between taking it and serving it.
  job->pending = true;
  job->finished = false;
  job->ticket = communicator_->TakeTicket();
  lock.unlock();
  changed_.notify_all();
  return OkStatus();
}

void Overlap::Pack(const Call& call, Job* job) {
  uint64_t bytes = 0;
  for (const Tensor& t : call.tensors) bytes += (t.bytes() + 63) / 64 * 64;
  // Never shrinks: steps repeat, and fresh pages cost more than the copies.
  if (job->buffer.size() < bytes) job->buffer.resize(bytes);
  job->name = call.name;
  job->names = call.names;
  job->call = call;
  job->call.name = job->name;
  job->call.names = job->names;
  std::byte* at = job->buffer.data();
  for (Tensor& t : job->call.tensors) {
    const uint64_t n = t.bytes();
    if (n > 0) std::memcpy(at, t.in, n);
    t.in = t.out = at;
    t.room = n;
    at += (n + 63) / 64 * 64;
  }
}

Status Overlap::Done(const Call& call, int64_t site) {
  std::unique_lock lock(mutex_);
  auto found = jobs_.find(site);
  if (found == jobs_.end() || !found->second->pending)
    return Status(Code::kFailedPrecondition,
                  communicator_->Prefix() + "DONE of bucket " + std::to_string(site) +
                      " of '" + std::string(call.name) + "' without its START");
  Job* job = found->second.get();
  while (!job->finished) {
    changed_.wait_for(lock, std::chrono::milliseconds(100));
    InterruptCheck check = interrupt_check.load();
    if (!job->finished && check != nullptr) {
      lock.unlock();
      if (check())
        communicator_->GiveUp(Code::kCancelled,
                              "was interrupted between START and DONE");
      lock.lock();
    }
  }
  job->pending = false;
  if (!job->status.ok()) return job->status;
  bool fits = call.tensors.size() == job->call.tensors.size();
  for (size_t i = 0; fits && i < call.tensors.size(); ++i)
    fits = call.tensors[i].room == job->call.tensors[i].room &&
           call.tensors[i].bytes() == job->call.tensors[i].room;
  if (!fits) return Unfit(call, site);
  for (size_t i = 0; i < call.tensors.size(); ++i) {
    const Tensor& to = call.tensors[i];
    if (to.bytes() > 0) std::memcpy(to.out, job->call.tensors[i].out, to.bytes());
  }
  return OkStatus();
}

Status Overlap::Unfit(const Call& call, int64_t site) const {
  return Status(Code::kInvalidArgument,
                communicator_->Prefix() + "bucket " + std::to_string(site) + " of '" +
                    std::string(call.name) + "': results and tensors differ in size");
}

void Overlap::Work() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
    if (queue_.empty()) return;
    Job* job = queue_.front();
    queue_.pop_front();
    lock.unlock();
    Status status;
    try {
      status = communicator_->RunInTurn(job->ticket, job->call);
    } catch (const std::exception& e) {
      status = Status(Code::kInternal, communicator_->Prefix() + e.what());
    }
    lock.lock();
    job->status = std::move(status);
    job->finished = true;
    changed_.notify_all();
  }
}

}  // namespace ringjax
