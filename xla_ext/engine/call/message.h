// A message on its way over a link: a header and its bytes; or, where it is lent
// (transport/loans.h), a header and a list of the pieces of memory that hold the bytes,
// for the peer to read them there.
#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <vector>

#include "base/status.h"
#include "engine/call/frame.h"
#include "transport/link.h"

namespace ringjax {

constexpr size_t kMostLent = 256;  // pieces of a message that is lent

struct Message {
  uint64_t head = 0;        // bytes of the header, and of the list, that have moved
  uint64_t bytes = 0;       // of the payload
  Frame frame;              // the header that has come
  std::vector<iovec> lent;  // the list, in the lender's memory; empty: not lent
  uint64_t loans = 0;       // bytes that the lender had lent before

  uint64_t heads() const { return sizeof(Frame) + lent.size() * sizeof(iovec); }
  bool opened() const { return head == heads(); }

  // Either side: what has not moved yet will follow the header.
  void Keep() {
    lent.clear();
    head = sizeof(Frame);
  }
};
static_assert(sizeof(iovec) == 2 * sizeof(uint64_t),
              "a list is what both sides expect");

// Of a loan, its header and list: sends some of them.
Status Announce(Link* link, Frame header, Message* message, bool* moved);

// Receives some of the header; or of the list, for which there is room in `lent`.
Status Open(Link* link, Message* message, bool* moved);

// Appends where the bytes from `begin` on are, in at most `most` pieces.
void PiecesOf(const std::vector<iovec>& lent, uint64_t begin, uint64_t bytes,
              size_t most, std::vector<iovec>* out);

}  // namespace ringjax
