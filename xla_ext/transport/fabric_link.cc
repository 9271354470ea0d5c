// See fabric_link.h.
#include "transport/fabric_link.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <string>
#include <thread>

#include "transport/channel.h"

namespace ringjax {
namespace {

using FabricClock = std::chrono::steady_clock;

// Peers need milliseconds to seconds to make their ends.
constexpr std::chrono::microseconds kBetweenMeetings(50);

Status NoAnswer(const FabricEndpoint& endpoint, double seconds) {
  return Status(Code::kDeadlineExceeded,
                "has not answered over the fabric '" + endpoint.provider() +
                    "' within " + std::to_string(static_cast<int>(seconds)) + " s");
}

}  // namespace

// -- writing ------------------------------------------------------------------------

Slot* FabricLink::SlotToWrite(size_t bytes, Status* status) {
  *status = messages_.WriteState();
  Slot* const slot = status->ok() ? messages_.FreeSlot(bytes) : nullptr;
  blocked_ = slot == nullptr;
  if (!blocked_ || !status->ok()) return slot;
  messages_.LookAtLifeline();
  *status = messages_.WriteState();
  return nullptr;
}

Result<size_t> FabricLink::TryWrite(std::span<const iovec> pieces) {
  size_t total = 0, moved = 0, piece = 0, inside = 0;
  for (const iovec& each : pieces) total += each.iov_len;
  while (moved < total) {
    Status status;
    Slot* const slot = SlotToWrite(total - moved, &status);
    if (slot == nullptr && moved == 0 && !status.ok()) return status;
    if (slot == nullptr) break;
    const size_t room = messages_.Room(*slot);
    size_t filled = 0;
    while (piece < pieces.size() && filled < room) {
      const size_t n = std::min(pieces[piece].iov_len - inside, room - filled);
      std::memcpy(slot->payload() + filled,
                  static_cast<const std::byte*>(pieces[piece].iov_base) + inside, n);
      filled += n;
      inside += n;
      if (inside < pieces[piece].iov_len) break;
      ++piece;
      inside = 0;
    }
    messages_.Send(slot, filled);
    moved += filled;
  }
  return moved;
}

Result<std::span<std::byte>> FabricLink::Reserve(size_t limit, size_t granularity) {
  Status status;
  reserved_ = SlotToWrite(limit, &status);
  if (!status.ok()) return status;
  if (reserved_ == nullptr) return std::span<std::byte>();
  const size_t bytes = std::min(limit, messages_.Room(*reserved_)) & ~(granularity - 1);
  return std::span(reserved_->payload(), bytes);
}

Status FabricLink::Commit(size_t bytes) {
  // As after TryWrite, the next Reserve or Flush tells that the link is broken.
  if (bytes > 0) messages_.Send(reserved_, bytes);
  return OkStatus();
}

// -- reading ------------------------------------------------------------------------

std::span<const std::byte> FabricLink::MessageFront() {
  if (messages_.Front() == nullptr) messages_.Turn();
  const Slot* const slot = messages_.Front();
  if (slot == nullptr) return {};
  return {slot->payload() + read_, slot->header.bytes - read_};
}

void FabricLink::DropFromMessage(size_t bytes) {
  read_ += bytes;
  if (read_ < messages_.Front()->header.bytes) return;
  read_ = 0;
  messages_.Pop();
}

std::span<const std::byte> FabricLink::Front() {
  if (carry_begin_ < carry_end_)
    return {carry_.data() + carry_begin_, carry_end_ - carry_begin_};
  return MessageFront();
}

void FabricLink::Drop(size_t bytes) {
  if (bytes == 0) return;
  if (carry_begin_ == carry_end_) return DropFromMessage(bytes);
  carry_begin_ += bytes;
  if (carry_begin_ == carry_end_) carry_begin_ = carry_end_ = 0;
}

// Moves bytes of messages to the carry until it has an element. Returns whether it
// has.
bool FabricLink::FillCarry(size_t granularity) {
  std::memmove(carry_.data(), carry_.data() + carry_begin_, carry_end_ - carry_begin_);
  carry_end_ -= std::exchange(carry_begin_, 0);
  while (carry_end_ < granularity) {
    const std::span<const std::byte> more = MessageFront();
    if (more.empty()) return false;
    const size_t n = std::min(more.size(), granularity - carry_end_);
    std::memcpy(carry_.data() + carry_end_, more.data(), n);
    carry_end_ += n;
    DropFromMessage(n);
  }
  return true;
}

Result<size_t> FabricLink::TryRead(std::span<const iovec> pieces) {
  scant_bytes_ = 0;
  size_t moved = 0, total = 0;
  bool dry = false;
  for (const iovec& piece : pieces) {
    total += piece.iov_len;
    for (size_t done = 0; done < piece.iov_len && !dry;) {
      const std::span<const std::byte> front = Front();
      const size_t n = std::min(front.size(), piece.iov_len - done);
      dry = n == 0;
      if (dry) break;
      std::memcpy(static_cast<std::byte*>(piece.iov_base) + done, front.data(), n);
      Drop(n);
      done += n;
      moved += n;
    }
  }
  if (moved == 0 && total > 0)
    if (Status s = messages_.ReadState(); !s.ok()) return s;
  return moved;
}

Result<std::span<const std::byte>> FabricLink::Peek(size_t limit, size_t granularity) {
  scant_bytes_ = 0;
  std::span<const std::byte> front = Front();
  if (!front.empty() && front.size() < granularity && limit >= granularity) {
    if (FillCarry(granularity))
      front = Front();
    else
      scant_bytes_ = carry_end_, front = {};
  }
  const size_t n = std::min(front.size(), limit) & ~(granularity - 1);
  if (n == 0 && limit > 0)
    if (Status s = messages_.ReadState(); !s.ok()) return s;
  return front.first(n);
}

bool FabricLink::Arm(bool want_read, bool want_write, std::vector<pollfd>* fds) {
  // An operation that ends here may be the one for which another link of the endpoint
  // was armed before.
  if (messages_.Turn() || (want_read && HasBytes())) return true;
  if (want_write && messages_.connected() &&
      (blocked_ ? messages_.HasFreeSlot() : messages_.AllSent()))
    return true;
  return messages_.Arm(fds);
}

// -- making links -------------------------------------------------------------------

Result<std::vector<std::unique_ptr<Link>>> MakeFabricLinks(
    const std::shared_ptr<FabricEndpoint>& endpoint, std::vector<FabricPeer> peers,
    double seconds, const std::function<bool()>& interrupted) {
  std::vector<std::unique_ptr<FabricLink>> links;
  for (FabricPeer& peer : peers)
    links.push_back(std::make_unique<FabricLink>(endpoint, std::move(peer.lifeline)));
  const auto failed = [](const Status& s, size_t index) {
    return WithPeer(s, static_cast<int>(index));
  };
  for (size_t i = 0; i < links.size(); ++i) {
    if (Status s = CheckKeys({&peers[i].key, 1}, 1); !s.ok()) return failed(s, i);
    if (Status s = links[i]->messages().Start(KeyOf(peers[i].key)); !s.ok())
      return failed(s, i);
  }
  const auto start = FabricClock::now();
  const std::chrono::duration<double> limit(seconds);
  for (bool all = seconds <= 0; !all;) {
    all = true;
    for (size_t i = 0; i < links.size(); ++i) {
      const Result<bool> met = links[i]->messages().Meet();
      if (!met.ok()) return failed(met.status(), i);
      all &= met.value();
      if (!met.value() && FabricClock::now() - start > limit)
        return failed(NoAnswer(*endpoint, seconds), i);
    }
    if (interrupted && interrupted()) return Status(Code::kCancelled, "interrupted");
    if (!all) std::this_thread::sleep_for(kBetweenMeetings);
  }
  std::vector<std::unique_ptr<Link>> made;
  for (auto& link : links) made.push_back(std::move(link));
  return made;
}

}  // namespace ringjax
