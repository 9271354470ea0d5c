// See message.h.
#include "engine/call/message.h"

#include <algorithm>

namespace ringjax {
namespace {

// Appends the part of the memory [from, from + bytes) that has not moved. In the
// stream, `before` bytes precede this memory, and the first `done` bytes of the stream
// have moved.
void Rest(void* from, uint64_t bytes, uint64_t before, uint64_t done,
          std::vector<iovec>* out) {
  const uint64_t skip = std::clamp(done, before, before + bytes) - before;
  if (skip < bytes)
    out->push_back({static_cast<std::byte*>(from) + skip, bytes - skip});
}

}  // namespace

Status SendHead(Link* link, Frame header, Message* message, bool* moved) {
  std::vector<iovec> pieces;
  Rest(&header, sizeof header, 0, message->head, &pieces);
  Rest(message->remote.data(), message->head_size() - sizeof header, sizeof header,
       message->head, &pieces);
  Result<size_t> n = link->TryWrite(pieces);
  if (!n.ok()) return n.status();
  message->head += n.value();
  *moved |= n.value() > 0;
  return OkStatus();
}

Status ReceiveHead(Link* link, Message* message, bool* moved) {
  std::vector<iovec> pieces;
  Rest(&message->frame, sizeof(Frame), 0, message->head, &pieces);
  Rest(message->remote.data(), message->head_size() - sizeof(Frame), sizeof(Frame),
       message->head, &pieces);
  Result<size_t> n = link->TryRead(pieces);
  if (!n.ok()) return n.status();
  message->head += n.value();
  *moved |= n.value() > 0;
  return OkStatus();
}

void PiecesOf(const std::vector<iovec>& pieces, uint64_t begin, uint64_t bytes,
              size_t most, std::vector<iovec>* out) {
  for (const iovec& piece : pieces) {
    if (bytes == 0 || out->size() == most) return;
    if (begin >= piece.iov_len) {
      begin -= piece.iov_len;
      continue;
    }
    const uint64_t n = std::min<uint64_t>(piece.iov_len - begin, bytes);
    out->push_back({static_cast<std::byte*>(piece.iov_base) + begin, n});
    bytes -= n;
    begin = 0;
  }
}

}  // namespace ringjax
