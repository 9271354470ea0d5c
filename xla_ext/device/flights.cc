// See flights.h.
#include "device/flights.h"

namespace ringjax {

Flights::~Flights() {
  for (Flight& f : flights_) {
    driver_.EventDestroy(f.begun);
    driver_.EventDestroy(f.ended);
  }
  for (cuda::Event e : spare_) driver_.EventDestroy(e);
}

Status Flights::Begin(cuda::Stream stream, Collective op, std::string title) {
  std::lock_guard lock(mutex_);
  while (spare_.size() < 2) {
    cuda::Event event = nullptr;
    constexpr unsigned kTimed = 0;
    RJ_CUDA(driver_, EventCreate, &event, kTimed);
    spare_.push_back(event);
  }
  RJ_CUDA(driver_, EventRecord, spare_.back(), stream);
  Flight flight;
  flight.op = op;
  flight.title = std::move(title);
  for (cuda::Event* event : {&flight.begun, &flight.ended}) {
    *event = spare_.back();
    spare_.pop_back();
  }
  flights_.push_back(std::move(flight));
  return OkStatus();
}

Status Flights::End(cuda::Stream stream) {
  std::lock_guard lock(mutex_);
  if (flights_.empty()) return OkStatus();
  RJ_CUDA(driver_, EventRecord, flights_.back().ended, stream);
  flights_.back().closed = true;
  return OkStatus();
}

void Flights::Drop() {
  std::lock_guard lock(mutex_);
  if (flights_.empty() || flights_.back().closed) return;
  spare_.push_back(flights_.back().begun);
  spare_.push_back(flights_.back().ended);
  flights_.pop_back();
}

void Flights::Land() {
  const Flight& first = flights_.front();
  float milliseconds = 0;
  if (driver_.EventElapsedTime != nullptr &&
      driver_.EventElapsedTime(&milliseconds, first.begun, first.ended) ==
          cuda::kSuccess)
    took_(first.op, milliseconds * 1e-3);
  spare_.push_back(first.begun);
  spare_.push_back(first.ended);
  flights_.pop_front();
}

std::optional<Flights::Oldest> Flights::Look() {
  std::lock_guard lock(mutex_);
  while (!flights_.empty() && flights_.front().closed &&
         !cuda::MayRun(driver_.EventQuery(flights_.front().ended)))
    Land();
  if (flights_.empty() || !flights_.front().closed) return std::nullopt;
  Flight& first = flights_.front();
  const auto now = std::chrono::steady_clock::now();
  if (!first.since) {
    if (cuda::MayRun(driver_.EventQuery(first.begun))) return std::nullopt;
    first.since = now;
  }
  return Oldest{first.title, std::chrono::duration<double>(now - *first.since).count()};
}

void Flights::Restart() {
  std::lock_guard lock(mutex_);
  if (!flights_.empty()) flights_.front().since.reset();
}

bool Flights::empty() {
  Look();
  std::lock_guard lock(mutex_);
  return flights_.empty();
}

}  // namespace ringjax
