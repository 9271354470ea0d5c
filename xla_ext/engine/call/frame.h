// Frame: the 64-byte header of each message on a link. Both ends know the next message
// from their schedules, and the frame lets the receiver check that it receives the
// message that it expects.
#pragma once

#include <cstdint>

namespace ringjax {

enum class FrameKind : uint16_t { kAgree = 1, kExplain, kData, kRound, kEnd, kCma };

struct Frame {
  static constexpr uint32_t kMagic = 0x584a4752;  // "RGJX"

  uint32_t magic = kMagic;
  uint16_t kind = 0;
  uint16_t agreed = 0;  // kAgree: 0 if the sender refuses or has seen a mismatch
  uint64_t job = 0;
  uint32_t epoch = 0;
  uint32_t communicator = 0;
  uint32_t lane = 0;
  uint32_t step = 0;  // kAgree, kEnd: dissemination round; kData, kCma: request index
  uint64_t sequence = 0;
  uint64_t fingerprint = 0;
  uint64_t bytes = 0;  // bytes of the payload
  // kAgree: the EvenRows of the call (descriptor.h), or 0 if the sender has seen
  // another number. kRound: 1 + the bytes of data that follow the message (Piggyback),
  // or 0 without such data. kCma: the number of pieces of the sender's memory that hold
  // the payload; a list of these pieces follows the frame in place of the payload.
  uint64_t attached = 0;

  // Returns whether both frames belong to one call of one communicator. Ignores kind,
  // agreed, step, fingerprint, bytes and attached.
  bool SameStream(const Frame& o) const {
    return magic == o.magic && job == o.job && epoch == o.epoch &&
           communicator == o.communicator && lane == o.lane && sequence == o.sequence;
  }
};
static_assert(sizeof(Frame) == 64, "frames are one cache line");

}  // namespace ringjax
