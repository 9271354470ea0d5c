// Failpoints: points in the code at which a test makes this process die, wait, fail or
// compute a wrong bit.
//
// A failpoint that is not armed costs a relaxed load and a branch that is not taken.
// ringjax/failpoints.py lists the failpoints of the Python code, and has the syntax
// that arms the failpoints of both languages.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace ringjax {

enum class Failpoint : uint8_t {
  kAgreed,         // the ranks have agreed on a call
  kMoving,         // some data of a call have moved
  kComplete,       // the call is complete on this rank, perhaps not on other ranks
  kClosed,         // the call is complete on all ranks, but has not returned here
  kInstall,        // an epoch is about to be installed
  kMap,            // shared memory is about to be mapped
  kCmaRead,        // CMA is about to read a peer's memory; an error makes the read fail
  kDeviceAborted,  // the teardown of a device has begun; no poison word is set
  kExactGradient,  // a gradient is about to be added to an accumulator
  kExactSend,      // values of this rank are about to be sent in an exact exchange
  kExactSum,       // this rank decodes its part of the sums of an exact exchange
  kExactResult,    // this rank receives the means of an exact exchange
};
inline constexpr std::string_view kFailpoints[] = {
    "call.agreed",    "call.moving", "call.complete", "call.closed",
    "epoch.install",  "memory.map",  "cma.read",      "device.aborted",
    "exact.gradient", "exact.send",  "exact.sum",     "exact.result"};

// Bit p is set once failpoint p has been armed. A failpoint is never disarmed.
inline std::atomic<uint32_t> armed_failpoints{0};

// Arms a failpoint for passage number `passage`, counted from 1; 0 means every passage.
// `action` is "kill", "exit" with `number` as the exit status, "sleep" for `number`
// seconds, or "flip" of bit `number` at a point of FlipAtFailpoint; any other text
// makes the failpoint fail with kInternal and that text. Fails with kInvalidArgument if
// there is no such failpoint.
Status ArmFailpoint(std::string_view point, const std::string& action, double number,
                    uint64_t passage);

// Counts a passage of `point` and performs the actions that are armed for that passage.
// For AtFailpoint only, which first checks without a lock whether the point is armed.
Status HitFailpoint(Failpoint point);

// Counts a passage of `point`. Returns the bits that are to be flipped in `bytes` bytes
// of memory. For FlipAtFailpoint and Flips, which first check whether the point is
// armed.
std::vector<uint64_t> HitFlip(Failpoint point, uint64_t bytes);

inline bool IsArmed(Failpoint point) {
  const uint32_t armed = armed_failpoints.load(std::memory_order_relaxed);
  return armed >> static_cast<int>(point) & 1;
}

// Evaluates a failpoint: if a test has armed it, counts a passage and performs the
// actions that are armed for that passage. Fails if an action fails.
inline Status AtFailpoint(Failpoint point) {
  if (IsArmed(point)) [[unlikely]]
    return HitFailpoint(point);
  return OkStatus();
}

// Flips bit `number` of `memory`, modulo the number of its bits, for each action "flip"
// that a test has armed for this passage of `point`, as faulty hardware may do.
inline void FlipAtFailpoint(Failpoint point, void* memory, size_t bytes) {
  if (!IsArmed(point)) [[likely]]
    return;
  for (const uint64_t bit : HitFlip(point, bytes))
    static_cast<uint8_t*>(memory)[bit / 8] ^= static_cast<uint8_t>(1u << bit % 8);
}

}  // namespace ringjax

// Evaluates a failpoint. If that fails, the enclosing function returns the error.
#define RJ_FAILPOINT(point) RJ_TRY(::ringjax::AtFailpoint(::ringjax::Failpoint::point))
