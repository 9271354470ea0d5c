// The header in front of every message on a data link. Both ends know from their
// schedules what comes next; the header proves that they mean the same thing.
#pragma once

#include <cstdint>

namespace ringjax {

enum class FrameKind : uint16_t { kAgree = 1, kExplain, kData, kRound, kEnd, kLoan };

struct Frame {
  static constexpr uint32_t kMagic = 0x584a4752;  // "RGJX"

  uint32_t magic = kMagic;
  uint16_t kind = 0;
  uint16_t agreed = 0;  // kAgree: 1 while all ranks heard of have one fingerprint
  uint64_t job = 0;
  uint32_t epoch = 0;
  uint32_t communicator = 0;
  uint32_t lane = 0;
  uint32_t step = 0;  // kAgree: the round; kData: which operand of the call
  uint64_t sequence = 0;
  uint64_t fingerprint = 0;
  uint64_t bytes = 0;  // payload that follows
  // kRound: 1 + bytes of values behind the message; 0: none. kLoan: how many pieces the
  // payload lies in, a list of which follows in its place.
  uint64_t beside = 0;

  // Everything that both ends must know alike; not kind, agreed, step, fingerprint,
  // bytes and beside.
  bool SameStream(const Frame& o) const {
    return magic == o.magic && job == o.job && epoch == o.epoch &&
           communicator == o.communicator && lane == o.lane && sequence == o.sequence;
  }
};
static_assert(sizeof(Frame) == 64, "frames are one cache line");

}  // namespace ringjax
