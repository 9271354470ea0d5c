// Failpoints: places at which a test has this process die, wait or fail.
//
// Unarmed, a point is a relaxed load and a branch that is not taken. Which there are in
// Python, and how they are all written, is in ringjax/failpoints.py.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/status.h"

namespace ringjax {

enum class Failpoint : uint8_t {
  kAgreed,     // the ranks have agreed about a call, and no data has moved
  kMoving,     // some of it has
  kComplete,   // the results are here; whether they are elsewhere is not known
  kClosed,     // they are everywhere; the call has not returned
  kInstall,    // a generation is about to follow another one
  kMap,        // shared memory is about to be mapped
  kBorrow,     // a peer's memory is about to be read; failing: it cannot be
  kCondemned,  // a device communicator has ended, and its device does not know
};
inline constexpr std::string_view kFailpoints[] = {
    "call.agreed",        "call.moving", "call.complete", "call.closed",
    "succession.install", "memory.map",  "memory.borrow", "device.condemned"};

// Bit p is set while point p is armed.
inline std::atomic<uint32_t> armed_failpoints{0};

// Arms a point. `action` is kill, exit, sleep, or anything else: fail with this text.
// At which passage: `passage` from 1, or 0 for all of them.
Status ArmFailpoint(std::string_view point, const std::string& action, double number,
                    uint64_t passage);

// What an armed point does when it is passed.
Status HitFailpoint(Failpoint point);

// At an armed point what it does, otherwise nothing.
inline Status AtFailpoint(Failpoint point) {
  const uint32_t armed = armed_failpoints.load(std::memory_order_relaxed);
  if (armed >> static_cast<int>(point) & 1) [[unlikely]]
    return HitFailpoint(point);
  return OkStatus();
}

}  // namespace ringjax

// In a function that returns a Status or a Result.
#define RJ_FAILPOINT(point) RJ_TRY(::ringjax::AtFailpoint(::ringjax::Failpoint::point))
