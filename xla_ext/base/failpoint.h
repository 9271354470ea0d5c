// Failpoints: points in the code at which a test makes this process die, wait or fail.
//
// A failpoint that is not armed costs a relaxed load and a branch that is not taken.
// ringjax/failpoints.py lists the failpoints of the Python code, and has the syntax for
// arming both kinds.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/status.h"

namespace ringjax {

enum class Failpoint : uint8_t {
  kAgreed,         // the ranks have agreed on a call
  kMoving,         // some data of a call has moved
  kComplete,       // the call is complete on this rank, perhaps not on other ranks
  kClosed,         // the call is complete on all ranks, and has not returned
  kInstall,        // an epoch is about to be installed
  kMap,            // shared memory is about to be mapped
  kCmaRead,        // CMA is about to read a peer's memory; an error makes the read fail
  kDeviceAborted,  // a device communicator is aborted, and its device not yet poisoned
};
inline constexpr std::string_view kFailpoints[] = {
    "call.agreed",   "call.moving", "call.complete", "call.closed",
    "epoch.install", "memory.map",  "cma.read",      "device.aborted"};

// Bit p is set while point p is armed.
inline std::atomic<uint32_t> armed_failpoints{0};

// Arms a failpoint for passage number `passage`, counted from 1, or for all passages if
// it is 0. `action` is "kill", "exit" with `number` as the exit status, or "sleep" for
// `number` seconds; any other text makes the failpoint fail with kInternal and that
// text. Fails with kInvalidArgument if there is no such failpoint.
Status ArmFailpoint(std::string_view point, const std::string& action, double number,
                    uint64_t passage);

// Performs the actions of an armed failpoint. Callers use AtFailpoint.
Status HitFailpoint(Failpoint point);

// Passes a failpoint: performs its actions if it is armed. Fails if an action does.
inline Status AtFailpoint(Failpoint point) {
  const uint32_t armed = armed_failpoints.load(std::memory_order_relaxed);
  if (armed >> static_cast<int>(point) & 1) [[unlikely]]
    return HitFailpoint(point);
  return OkStatus();
}

}  // namespace ringjax

// Passes a failpoint; the enclosing function returns its error (a Status or a Result).
#define RJ_FAILPOINT(point) RJ_TRY(::ringjax::AtFailpoint(::ringjax::Failpoint::point))
