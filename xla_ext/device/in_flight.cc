// See in_flight.h.
#include "device/in_flight.h"

namespace ringjax {

InFlight::~InFlight() {
  for (Operation& f : operations_) {
    driver_.EventDestroy(f.begun);
    driver_.EventDestroy(f.ended);
  }
  for (cuda::Event e : spare_) driver_.EventDestroy(e);
}

Status InFlight::Begin(cuda::Stream stream, Collective op, std::string title) {
  std::lock_guard lock(mutex_);
  while (spare_.size() < 2) {
    cuda::Event event = nullptr;
    constexpr unsigned kTimed = 0;
    RJ_CUDA(driver_, EventCreate, &event, kTimed);
    spare_.push_back(event);
  }
  RJ_CUDA(driver_, EventRecord, spare_.back(), stream);
  Operation operation;
  operation.op = op;
  operation.title = std::move(title);
  for (cuda::Event* event : {&operation.begun, &operation.ended}) {
    *event = spare_.back();
    spare_.pop_back();
  }
  operations_.push_back(std::move(operation));
  return OkStatus();
}

Status InFlight::End(cuda::Stream stream) {
  std::lock_guard lock(mutex_);
  if (operations_.empty()) return OkStatus();
  RJ_CUDA(driver_, EventRecord, operations_.back().ended, stream);
  operations_.back().closed = true;
  return OkStatus();
}

void InFlight::Drop() {
  std::lock_guard lock(mutex_);
  if (operations_.empty() || operations_.back().closed) return;
  spare_.push_back(operations_.back().begun);
  spare_.push_back(operations_.back().ended);
  operations_.pop_back();
}

void InFlight::Retire() {
  const Operation& first = operations_.front();
  float milliseconds = 0;
  if (driver_.EventElapsedTime != nullptr &&
      driver_.EventElapsedTime(&milliseconds, first.begun, first.ended) ==
          cuda::kSuccess)
    report_time_(first.op, milliseconds * 1e-3);
  spare_.push_back(first.begun);
  spare_.push_back(first.ended);
  operations_.pop_front();
}

std::optional<InFlight::Oldest> InFlight::PollOldest() {
  std::lock_guard lock(mutex_);
  while (!operations_.empty() && operations_.front().closed &&
         !cuda::MayRun(driver_.EventQuery(operations_.front().ended)))
    Retire();
  if (operations_.empty() || !operations_.front().closed) return std::nullopt;
  Operation& first = operations_.front();
  const auto now = std::chrono::steady_clock::now();
  if (!first.since) {
    if (cuda::MayRun(driver_.EventQuery(first.begun))) return std::nullopt;
    first.since = now;
  }
  return Oldest{first.title, std::chrono::duration<double>(now - *first.since).count()};
}

void InFlight::Restart() {
  std::lock_guard lock(mutex_);
  if (!operations_.empty()) operations_.front().since.reset();
}

bool InFlight::empty() {
  PollOldest();
  std::lock_guard lock(mutex_);
  return operations_.empty();
}

}  // namespace ringjax
