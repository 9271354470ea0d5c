// See fabric_messages.h.
#include "transport/fabric_messages.h"

#include <fcntl.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <thread>
#include <utility>

#include "transport/channel.h"

namespace ringjax {
namespace {

using FabricClock = std::chrono::steady_clock;

// After a loss, the last messages of the peer may take this long to arrive.
constexpr std::chrono::milliseconds kGrace(20);
// Looks in vain after which a link looks at its lifeline, which is a system call.
constexpr uint64_t kLooksPerLifeline = 64;
constexpr int kCancelTurns = 2000;
constexpr size_t kSealBytes = Cipher::kTagBytes;

Status PeerClosed() { return Status(Code::kUnavailable, "has closed the connection"); }
Status Nonsense(const std::string& what) {
  return Status(Code::kUnavailable,
                "has sent damaged messages over the fabric: " + what);
}

// Checks that both ends can exchange messages.
Status CheckGreeting(const FabricGreeting& g, const FabricEndpoint& endpoint,
                     bool sealed) {
  const FabricOptions& own = endpoint.options();
  if (g.magic != FabricGreeting::kMagic)
    return Nonsense("it greets in an unknown format");
  if (g.protocol != endpoint.protocol())
    return Status(Code::kUnavailable,
                  "has a libfabric that speaks protocol " + std::to_string(g.protocol) +
                      "; '" + endpoint.provider() + "' of this rank speaks " +
                      std::to_string(endpoint.protocol()));
  if (g.slot_bytes != own.slot_bytes || g.slots != static_cast<uint64_t>(own.slots))
    return Status(Code::kUnavailable, "has " + std::to_string(g.slots) + " slots of " +
                                          std::to_string(g.slot_bytes) +
                                          " bytes, this rank " +
                                          std::to_string(own.slots) + " of " +
                                          std::to_string(own.slot_bytes));
  if (g.sealed != static_cast<uint64_t>(sealed))
    return Status(Code::kUnavailable,
                  "disagrees with this rank: only one end encrypts");
  if (g.address_bytes != endpoint.address().size())
    return Nonsense("it greets with an impossible address");
  return OkStatus();
}

}  // namespace

// -- the introduction ---------------------------------------------------------------

Status FabricMessages::Start(std::span<const std::byte> key) {
  const int fd = lifeline_.get(), flags = fcntl(fd, F_GETFL);
  if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) != 0 ||
      fcntl(fd, F_SETFD, FD_CLOEXEC) != 0)
    return Status(Code::kInternal, std::string("fcntl: ") + std::strerror(errno));
  if (!key.empty()) {
    encrypt_ = std::make_unique<Cipher>(key.first<Cipher::kSecretBytes>(), true);
    decrypt_ = std::make_unique<Cipher>(
        key.subspan<Cipher::kSecretBytes, Cipher::kSecretBytes>(), false);
  }
  const size_t small = std::min(kSmallSlotBytes, endpoint_->options().slot_bytes);
  const size_t notes = kNoteBytes * kNoteCount;
  auto memory = SlotMemory::Map(endpoint_.get(), 2 * (small * kSmallSlotCount + notes));
  if (!memory.ok()) return memory.status();
  buffers_->memory.push_back(std::move(memory.value()));
  SlotMemory* const all = buffers_->memory.back().get();
  for (const bool sends : {true, false}) {
    SlotRing* const rings = sends ? buffers_->out : buffers_->in;
    rings[kSmallSlots].Open(all, this, kSmallSlots, sends, kSmallSlotCount, small);
    rings[kNotes].Open(all, this, kNotes, sends, kNoteCount, kNoteBytes);
  }
  tag_ = endpoint_->NewTag();
  for (const SlotClass kind : {kSmallSlots, kNotes})
    for (Slot& slot : buffers_->in[kind].slots()) unposted_.push_back(&slot);
  Turn();
  return broken_;
}

Result<bool> FabricMessages::Meet() {
  Turn();
  if (broken_.ok() && !lost_.ok()) broken_ = lost_;
  if (!broken_.ok()) return broken_;
  look_now_ = true;
  LookAtLifeline();
  return connected_ && hello_ && AllSent();
}

void FabricMessages::Connect() {
  // Before the peer may send, its first messages have slots.
  if (!greeted_ && unposted_.empty()) Greet();
  if (!greeted_ || !broken_.ok() || !ReadGreeting()) return;
  if (Status s = CheckGreeting(greeting_, *endpoint_, encrypt_ != nullptr); !s.ok())
    return Break(s);
  const Result<uint64_t> peer =
      endpoint_->Insert(std::string(greeting_.address.data(), greeting_.address_bytes));
  if (!peer.ok()) return Break(peer.status());
  peer_ = peer.value();
  connected_ = true;
  // Providers connect when the first message is sent, which takes both ends.
  Dispatch(&buffers_->out[kSmallSlots].front(), 0, kHello);
}

void FabricMessages::Greet() {
  FabricGreeting own;
  const std::string& address = endpoint_->address();
  own.protocol = endpoint_->protocol();
  own.slot_bytes = endpoint_->options().slot_bytes;
  own.slots = static_cast<uint64_t>(endpoint_->options().slots);
  own.sealed = encrypt_ != nullptr;
  own.tag = tag_;
  own.address_bytes = address.size();
  std::memcpy(own.address.data(), address.data(), address.size());
  // The connection is new, so its buffer has room for all of it.
  const ssize_t n =
      send(lifeline_.get(), &own, sizeof own, MSG_NOSIGNAL | MSG_DONTWAIT);
  if (n != static_cast<ssize_t>(sizeof own)) return Break(PeerClosed());
  greeted_ = true;
  owed_ = {};  // the peer knows that the small slots are free
}

bool FabricMessages::ReadGreeting() {
  auto* const to = reinterpret_cast<char*>(&greeting_) + greeting_bytes_;
  const ssize_t n =
      recv(lifeline_.get(), to, sizeof greeting_ - greeting_bytes_, MSG_DONTWAIT);
  if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR)) Break(PeerClosed());
  if (n > 0) greeting_bytes_ += static_cast<size_t>(n);
  return greeting_bytes_ == sizeof greeting_;
}

// -- sending ------------------------------------------------------------------------

size_t FabricMessages::Room(const Slot& slot) const {
  return buffers_->out[slot.kind].bytes() - sizeof(FabricHeader) -
         (encrypt_ ? kSealBytes : 0);
}

bool FabricMessages::HasFreeSlot() {
  return connected_ && unsent_.empty() && credits_[wanted_] > 0 &&
         buffers_->out[wanted_].open() && !buffers_->out[wanted_].front().under_way;
}

void FabricMessages::ChooseClass(size_t bytes) {
  SlotRing& small = buffers_->out[kSmallSlots];
  const bool fits = !connected_ || bytes <= Room(small.front()) ||
                    small.bytes() == endpoint_->options().slot_bytes;
  wants_large_ |= !fits;
  wanted_ = !fits && buffers_->out[kLargeSlots].open() ? kLargeSlots : kSmallSlots;
}

Slot* FabricMessages::FreeSlot(size_t bytes) {
  ChooseClass(bytes);
  if (!HasFreeSlot()) {
    Turn();
    ChooseClass(bytes);  // The peer may have granted large slots.
  }
  if (!broken_.ok() || !HasFreeSlot()) return nullptr;
  return &buffers_->out[wanted_].front();
}

void FabricMessages::Dispatch(Slot* slot, size_t bytes, uint32_t flags) {
  SlotRing& ring = buffers_->out[slot->kind];
  if (wants_large_ && !buffers_->out[kLargeSlots].open()) flags |= kWantLarge;
  slot->header = {ring.number(), sent_order_++,        static_cast<uint32_t>(bytes),
                  flags,         {owed_[0], owed_[1]}, 0};
  owed_ = {};
  std::memcpy(slot->memory, &slot->header, sizeof slot->header);
  slot->filled = sizeof slot->header + bytes;
  if (encrypt_) Seal(slot);
  if (slot->kind != kNotes) --credits_[slot->kind];
  ring.Next();
  unsent_.push_back(slot);
  SendWaiting();
}

void FabricMessages::Seal(Slot* slot) {
  std::byte* const body = slot->payload();
  const size_t bytes = slot->header.bytes;
  const bool sealed = encrypt_->Begin({slot->memory, sizeof(FabricHeader)}) &&
                      (bytes == 0 || encrypt_->Piece(body, body, bytes)) &&
                      encrypt_->End(body + bytes);
  if (!sealed) Break(Status(Code::kInternal, "a message could not be encrypted"));
  slot->filled += kSealBytes;
}

void FabricMessages::SendWaiting() {
  while (!unsent_.empty() && broken_.ok()) {
    Slot* const slot = unsent_.front();
    const auto posted = endpoint_->Send(
        peer_, slot->memory, slot->filled, buffers_->out[slot->kind].registered(),
        greeting_.tag | static_cast<uint64_t>(slot->kind), slot);
    if (posted == FabricEndpoint::Posted::kLater) return;
    if (posted == FabricEndpoint::Posted::kFailed) return Break(endpoint_->status());
    unsent_.pop_front();
    ++sends_under_way_;
  }
}

// Sends a note if half of the slots of a class are due. The peer has at most twice as
// many in notes that it has not read, so four slots for these notes suffice. The last
// message of a link is a note as well, because a note needs no slot of the peer. The
// peer that says bye waits for the answer: the end of its endpoint could take away
// messages that this end has not received.
void FabricMessages::SendNote() {
  const bool last = closing_ || bye_;
  bool due = last;
  for (const SlotClass kind : {kSmallSlots, kLargeSlots})
    due |= owed_[kind] > 0 && owed_[kind] >= (buffers_->in[kind].size() + 1) / 2;
  Slot& note = buffers_->out[kNotes].front();
  if (!due || !connected_ || said_bye_ || !unsent_.empty() || note.under_way) return;
  if (!broken_.ok() || !lost_.ok()) return;
  said_bye_ = last;
  Dispatch(&note, 0, last ? kBye : 0);
}

// -- receiving ----------------------------------------------------------------------

void FabricMessages::Completed(FabricEndpoint::Operation* operation,
                               const Status& status) {
  auto* const slot = static_cast<Slot*>(operation);
  // A send that has failed counts as under way, so that no Flush succeeds after it.
  if (slot->sends && status.ok()) --sends_under_way_;
  if (cancelled_ && !status.ok()) return;
  if (!status.ok()) return slot->sends ? Lose(status) : Break(status);
  if (slot->sends) return;
  slot->arrived = true;
  std::memcpy(&slot->header, slot->memory, sizeof slot->header);
  while (broken_.ok()) {
    Slot* const next = NextArrived();
    if (next == nullptr) return;
    Accept(next);
  }
}

// Returns the next message if it has arrived. Messages of one class arrive in order,
// and the orders in their headers say how the classes interleave.
Slot* FabricMessages::NextArrived() {
  uint32_t most = 0;
  for (SlotRing& ring : buffers_->in) most += static_cast<uint32_t>(ring.size());
  for (SlotRing& ring : buffers_->in) {
    if (!ring.open() || !ring.front().arrived) continue;
    Slot& slot = ring.front();
    if (slot.received < sizeof(FabricHeader) || slot.header.number != ring.number() ||
        slot.header.order - accepted_order_ >= most) {
      Break(Nonsense("a message is missing, or was changed"));
      return nullptr;
    }
    if (slot.header.order == accepted_order_) return &slot;
  }
  return nullptr;
}

Status FabricMessages::CheckMessage(const Slot& slot) const {
  const FabricHeader& h = slot.header;
  const size_t extra = sizeof h + (decrypt_ ? kSealBytes : 0);
  if (slot.received > buffers_->in[slot.kind].bytes() || slot.received < extra ||
      h.bytes != slot.received - extra)
    return Nonsense("a length is impossible");
  if ((h.flags & ~uint32_t{kKnownFlags}) != 0 || h.unused != 0)
    return Nonsense("a flag is unknown");
  if (bye_) return Nonsense("a message follows the last one");
  if (slot.kind == kNotes && h.bytes > 0) return Nonsense("a note has a payload");
  return OkStatus();
}

bool FabricMessages::Unseal(Slot* slot) {
  std::byte* const body = slot->payload();
  const size_t bytes = slot->header.bytes;
  return decrypt_->Begin({slot->memory, sizeof(FabricHeader)}) &&
         (bytes == 0 || decrypt_->Piece(body, body, bytes)) &&
         decrypt_->End(body + bytes);
}

void FabricMessages::Accept(Slot* slot) {
  if (Status s = CheckMessage(*slot); !s.ok()) return Break(s);
  if (decrypt_ && !Unseal(slot))
    return Break(Nonsense("they are not those that it has encrypted"));
  slot->arrived = false;
  buffers_->in[slot->kind].Next();
  ++accepted_order_;
  if (!lost_.ok()) last_arrival_ = FabricClock::now();
  const FabricHeader& h = slot->header;
  hello_ |= (h.flags & kHello) != 0;
  bye_ |= (h.flags & kBye) != 0;
  if ((h.flags & kWantLarge) != 0 && !buffers_->in[kLargeSlots].open())
    OpenLarge(&buffers_->in[kLargeSlots], false);
  // Slots that a note returns count once the slot of the note is free again, so that
  // the peer never has more notes under way than this end has slots for.
  if (slot->kind != kNotes) AddCredits(h);
  if (h.bytes > 0)
    accepted_.push_back(slot);
  else
    Recycle(slot);
}

void FabricMessages::AddCredits(const FabricHeader& header) {
  const uint32_t large =
      wants_large_ ? static_cast<uint32_t>(endpoint_->options().slots) : 0;
  const uint32_t most[] = {kSmallSlotCount, large};
  for (const SlotClass kind : {kSmallSlots, kLargeSlots}) {
    if (header.returned[kind] > most[kind] - credits_[kind])
      return Break(Nonsense("it returns more slots than it has"));
    credits_[kind] += header.returned[kind];
  }
  if (credits_[kLargeSlots] > 0 && !buffers_->out[kLargeSlots].open())
    OpenLarge(&buffers_->out[kLargeSlots], true);
}

void FabricMessages::OpenLarge(SlotRing* ring, bool sends) {
  const FabricOptions& options = endpoint_->options();
  const size_t count = static_cast<size_t>(options.slots);
  const size_t bytes = options.slot_bytes + kLargeSlotExtra;
  auto memory = SlotMemory::Map(endpoint_.get(), count * bytes);
  if (!memory.ok()) return Break(memory.status());
  buffers_->memory.push_back(std::move(memory.value()));
  ring->Open(buffers_->memory.back().get(), this, kLargeSlots, sends, count, bytes);
  for (Slot& slot : ring->slots())
    if (!sends) Recycle(&slot);
}

void FabricMessages::Recycle(Slot* slot) {
  unposted_.push_back(slot);
  PostWaiting();
}

void FabricMessages::PostWaiting() {
  while (!unposted_.empty() && broken_.ok()) {
    Slot* const slot = unposted_.front();
    const SlotRing& ring = buffers_->in[slot->kind];
    const auto posted =
        endpoint_->Receive(slot->memory, ring.bytes(), ring.registered(),
                           tag_ | static_cast<uint64_t>(slot->kind), slot);
    if (posted == FabricEndpoint::Posted::kLater) return;
    if (posted == FabricEndpoint::Posted::kFailed) return Break(endpoint_->status());
    unposted_.pop_front();
    if (slot->kind == kNotes)
      AddCredits(std::exchange(slot->header, {}));
    else
      ++owed_[slot->kind];
  }
}

void FabricMessages::Pop() {
  Slot* const slot = accepted_.front();
  accepted_.pop_front();
  Recycle(slot);
  SendNote();
}

// -- the state ----------------------------------------------------------------------

bool FabricMessages::Turn() {
  const bool any = endpoint_->Poll();
  if (!endpoint_->status().ok()) Break(endpoint_->status());
  if (!broken_.ok()) return any;
  if (!unposted_.empty()) PostWaiting();
  if (!connected_) Connect();
  if (!unsent_.empty()) SendWaiting();
  SendNote();
  return any;
}

Status FabricMessages::WriteState() const {
  if (!broken_.ok()) return broken_;
  if (!lost_.ok()) return lost_;
  return bye_ ? PeerClosed() : OkStatus();
}

// There is nothing to read: not yet, or for ever?
Status FabricMessages::ReadState() {
  if (!broken_.ok()) return broken_;
  if (bye_) return PeerClosed();
  LookAtLifeline();
  return broken_;
}

void FabricMessages::LookAtLifeline() {
  if (!broken_.ok() || !connected_) return;
  if (lost_.ok() && !look_now_ && ++looks_ % kLooksPerLifeline != 0) return;
  look_now_ = false;
  char byte;
  const ssize_t n = recv(lifeline_.get(), &byte, 1, MSG_PEEK | MSG_DONTWAIT);
  if (n > 0) return Break(Nonsense("bytes follow the greeting"));
  if (n == 0 || (errno != EAGAIN && errno != EINTR)) Lose(PeerClosed());
  if (lost_.ok()) return;
  Turn();
  if (accepted_.empty() && FabricClock::now() - last_arrival_ > kGrace) Break(lost_);
}

void FabricMessages::Lose(const Status& why) {
  if (!lost_.ok()) return;
  lost_ = why;
  last_arrival_ = FabricClock::now();
}

void FabricMessages::Break(const Status& why) {
  if (broken_.ok()) broken_ = why;
}

Result<bool> FabricMessages::Flush() {
  if (!AllSent()) Turn();
  if (broken_.ok() && AllSent()) return true;
  // A peer may say bye as soon as it has the last message, which can be before the
  // provider reports here that the message was sent.
  if (!broken_.ok()) return broken_;
  if (!lost_.ok()) return lost_;
  return false;
}

bool FabricMessages::Arm(std::vector<pollfd>* fds) {
  if (!broken_.ok() || !lost_.ok() || bye_ || !unsent_.empty()) return true;
  if (connected_ && !unposted_.empty()) return true;
  look_now_ = true;
  if (endpoint_->Arm(fds)) return true;
  fds->push_back({lifeline_.get(), POLLIN | POLLRDHUP, 0});
  return false;
}

bool FabricMessages::Close() {
  closing_ = true;
  Turn();
  look_now_ = true;
  LookAtLifeline();
  return !connected_ || !broken_.ok() || !lost_.ok() ||
         (said_bye_ && bye_ && AllSent());
}

FabricMessages::~FabricMessages() {
  if (endpoint_->in_child()) {
    new std::shared_ptr<SlotBuffers>(std::move(buffers_));  // the parent uses it
    return;
  }
  for (int i = 0; i < kCancelTurns && !Close() && !(said_bye_ && AllSent()); ++i) {
  }
  cancelled_ = true;
  buffers_->ForEach([this](Slot& slot) { endpoint_->Cancel(&slot); });
  const auto drain = [this] {
    for (int i = 0; i < kCancelTurns && buffers_->UnderWay(); ++i) endpoint_->Poll();
  };
  drain();
  if (connected_) endpoint_->Remove(peer_);
  drain();
  if (!buffers_->UnderWay()) return;
  buffers_->ForEach([](Slot& slot) { slot.owner = nullptr; });
  endpoint_->Keep(buffers_);
}

}  // namespace ringjax
