// A message on its way over a link: a header, then the payload. If the receiver reads
// the payload by CMA (transport/cma.h), a list of the pieces of the sender's memory
// that hold the payload follows the header instead.
#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <vector>

#include "base/status.h"
#include "engine/call/frame.h"
#include "transport/link.h"

namespace ringjax {

constexpr size_t kMaxCmaPieces = 256;  // pieces of a message that is read by CMA

// One message as its sender or its receiver sees it, and how much of it has moved.
struct Message {
  uint64_t head = 0;            // bytes of the header, and of the list, that have moved
  uint64_t bytes = 0;           // bytes of the payload that have moved
  Frame frame;                  // receiver: the header that has arrived
  std::vector<iovec> remote;    // pieces of the sender's memory; empty without CMA
  uint64_t exposed_before = 0;  // bytes that the sender had exposed before this message

  uint64_t head_size() const { return sizeof(Frame) + remote.size() * sizeof(iovec); }
  bool head_complete() const { return head == head_size(); }

  // Makes the rest of the payload travel through the ring buffer. Called on both sides.
  void FallBack() {
    remote.clear();
    head = sizeof(Frame);
  }
};
static_assert(sizeof(iovec) == 2 * sizeof(uint64_t),
              "a list is what both sides expect");

// Sends as much of the header and the list as the link accepts. Sets `*moved` if bytes
// moved.
Status SendHead(Link* link, Frame header, Message* message, bool* moved);

// Receives the bytes of the header and the list that have arrived. The caller first
// sets the length of `remote` to that of the list. Sets `*moved` if bytes moved.
Status ReceiveHead(Link* link, Message* message, bool* moved);

// Appends to `out` the parts of `pieces` that hold `bytes` bytes, beginning at byte
// `begin`. Stops when `out` has `most` entries.
void PiecesOf(const std::vector<iovec>& pieces, uint64_t begin, uint64_t bytes,
              size_t most, std::vector<iovec>* out);

}  // namespace ringjax
