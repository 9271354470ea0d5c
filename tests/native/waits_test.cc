// Wake-ups that must not be lost. Every wait ends by itself after a time slice, which
// would hide a lost wake-up. So the slice here is longer than a test may take.
#include <poll.h>

#include <atomic>
#include <chrono>
#include <random>
#include <thread>

#include "check.h"
#include "engine/call/ticket_lock.h"
#include "engine/call/waiter.h"
#include "engine/communicator/progress.h"
#include "local_world.h"

namespace ringjax {
namespace {

// Returns whether the condition becomes true within a minute.
template <typename Condition>
bool Soon(Condition condition) {
  const auto limit = Clock::now() + std::chrono::seconds(60);
  while (!condition() && Clock::now() < limit) std::this_thread::yield();
  return condition();
}

// Spins for some nanoseconds, so that another thread gets a few instructions further.
void Spin(unsigned turns) {
  for (std::atomic<unsigned> left = turns; left > 0;) --left;
}

// The holder leaves at any moment after the waiter's last check before its sleep.
TEST(NoWaiterMissesThatTheHolderHasLeft) {
  std::mt19937 random(3);
  const auto limit = Clock::now() + std::chrono::seconds(2);
  bool in_time = true;
  for (int i = 0; i < 20000 && in_time && Clock::now() < limit; ++i) {
    TicketLock ticket_lock(std::chrono::hours(1));
    ticket_lock.Take();
    std::atomic<bool> asked = false, through = false;
    std::thread waiter([&] {
      const auto stop = [&] { return asked = true, OkStatus(); };
      CHECK(ticket_lock.Wait(ticket_lock.Take(), stop).ok());
      through = true;
    });
    // To yield the core would take longer than the race that is tested.
    for (int looks = 1; !asked; ++looks)
      if (looks % 10000 == 0) std::this_thread::yield();
    Spin(random() % 50);
    ticket_lock.Leave();
    in_time = Soon([&] { return through.load(); });
    CHECK(in_time);
    while (!through) ticket_lock.WakeAll();  // repeats the lost wake-up
    waiter.join();
  }
}

// WakeAll runs just after the check that allows a waiter to wait.
TEST(NoWaiterMissesThatTheTurnsHaveEnded) {
  TicketLock ticket_lock(std::chrono::hours(1));
  ticket_lock.Take();
  std::atomic<bool> over = false, through = false;
  std::thread waiter([&] {
    const auto stop = [&] {
      if (over.exchange(true)) return Status(Code::kUnavailable, "over");
      ticket_lock.WakeAll();
      return OkStatus();
    };
    CHECK(ticket_lock.Wait(ticket_lock.Take(), stop).code() == Code::kUnavailable);
    through = true;
  });
  CHECK(Soon([&] { return through.load(); }));
  while (!through) ticket_lock.WakeAll();
  waiter.join();
}

// Aborts in Arm, which is after the waiter has checked whether to continue.
class AbortsLate final : public Waitable {
 public:
  AbortsLate(std::atomic<bool>* aborted, Doorbell* bell, bool polls)
      : aborted_(aborted), bell_(bell), polls_(polls) {}
  bool Arm(bool, bool, std::vector<pollfd>* fds) override {
    if (polls_) fds->push_back({-1, POLLIN, 0});
    aborted_->store(true);
    bell_->Ring();
    return false;
  }
  void Disarm() override {}

 private:
  std::atomic<bool>* aborted_;
  Doorbell* bell_;
  const bool polls_;
};

// A sleep after a lost ring takes a whole slice. Any sleep may take that long on a busy
// machine, but not all of them.
TEST(AnAbortJustBeforeTheSleepEndsIt) {
  for (const bool polls : {false, true}) {
    Doorbell bell;
    bool in_time = false;
    for (int i = 0; i < 10 && !in_time; ++i) {
      std::atomic<bool> aborted = false;
      AbortsLate link(&aborted, &bell, polls);
      Waiter waiter(&bell, &aborted, 0, true);
      waiter.set_slice(std::chrono::seconds(1));
      const auto idle = [&] {
        return waiter.Idle(
            [&] { return std::vector<Waiter::Interest>{{&link, 1, 0}}; });
      };
      const auto start = Clock::now();
      CHECK(idle().ok());
      in_time = Clock::now() - start < std::chrono::seconds(1);
      CHECK(idle().code() == Code::kUnavailable);
    }
    CHECK(in_time);
  }
}

// Otherwise Quiesce would wait for a call that has just ended.
TEST(ACallThatEndsChecksForAnAbort) {
  Progress progress;
  progress.Begin();
  bool settled = false;
  progress.End([&] { return settled = progress.AwaitInactive(0); });
  CHECK(settled);
}

}  // namespace
}  // namespace ringjax
