// The clock of the first rank, as other ranks read it.
#include <chrono>
#include <cmath>
#include <thread>
#include <vector>

#include "check.h"
#include "heartbeats.h"
#include "local_world.h"

namespace ringjax {
namespace {

TEST(AClockReadingIsExactToHalfTheRoundTrip) {
  World world({0, 0, 0});
  const auto beats = JoinHeartbeats(world.ranks);
  ClockOffsets& zero = beats[0]->clock_offsets();
  ClockOffsets& two = beats[2]->clock_offsets();
  const auto start = Clock::now();
  const auto passed = [start] {
    return std::chrono::duration<double>(Clock::now() - start).count();
  };
  zero.RequestClock(5);  // sends nothing: rank 0 has the clock
  two.RequestClock(5);
  two.RequestClock(3);  // adds requests only if some of the five were answered
  std::vector<ClockReading> readings;
  while (readings.size() < 5 && passed() < 60) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    for (const ClockReading& reading : two.TakeReadings()) readings.push_back(reading);
  }
  CHECK(readings.size() >= 5 && readings.size() <= 8);
  for (const ClockReading& reading : readings) {
    CHECK_EQ(reading.rank, 0);
    CHECK(reading.trip > 0 && reading.trip <= passed());
    // Threads share one clock, so the true difference is 0.
    CHECK(std::abs(reading.ahead) <= reading.trip / 2);
  }
  CHECK(zero.TakeReadings().empty() &&
        beats[1]->clock_offsets().TakeReadings().empty());
  beats[0]->Stop();
  two.RequestClock(1);  // no effect: the heartbeat has stopped
  for (const auto& beat : beats) beat->Stop();
}

}  // namespace
}  // namespace ringjax
