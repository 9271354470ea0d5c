// Messages between the two ends of a link over a fabric, in slots of registered memory.
//
// A sender uses a slot of its own for each message, and may have as many messages under
// way as the receiver has slots. The receiver returns slots in the headers of its own
// messages, or in notes once half of the slots are due. So no message ever arrives
// that has no slot, and no provider has to buffer one.
//
// libfabric does not report that a peer is lost: on its connectionless endpoints a
// posted receive belongs to no peer. So the authenticated TCP connection over which the
// two ends exchange their addresses stays open as the `lifeline`. The system closes it
// when the process of the peer ends. libfabric works only while it is called; so each
// call that finds nothing to do polls.
#pragma once

#include <array>
#include <chrono>
#include <deque>
#include <memory>
#include <span>
#include <vector>

#include "base/status.h"
#include "transport/cipher.h"
#include "transport/descriptor.h"
#include "transport/fabric_slots.h"

namespace ringjax {

// One end introduces itself to the other over the lifeline.
struct FabricGreeting {
  static constexpr uint32_t kMagic = 0x726a6632;  // changes with FabricHeader, too

  uint32_t magic = kMagic;
  uint32_t protocol = 0;  // the provider's
  uint64_t slot_bytes = 0, slots = 0, sealed = 0;
  uint64_t tag = 0;  // Messages to this end have it, plus their SlotClass.
  uint64_t address_bytes = 0;
  std::array<char, 512> address = {};
};

class FabricMessages final : FabricEndpoint::Owner {
 public:
  enum Flag : uint32_t { kHello = 1, kBye = 2, kWantLarge = 4, kKnownFlags = 7 };

  FabricMessages(std::shared_ptr<FabricEndpoint> endpoint, Descriptor lifeline)
      : endpoint_(std::move(endpoint)), lifeline_(std::move(lifeline)) {}
  ~FabricMessages();

  // Prepares the receives. `key` is empty, or has kChannelKeyBytes.
  Status Start(std::span<const std::byte> key);
  // Goes on with the introduction, and returns whether both ends have heard each other.
  Result<bool> Meet();
  const FabricEndpoint& endpoint() const { return *endpoint_; }

  // Returns a slot for a message of which `bytes` are left, or null.
  Slot* FreeSlot(size_t bytes);
  bool HasFreeSlot();  // considers the class that FreeSlot has chosen
  size_t Room(const Slot& slot) const;
  // Sends the first `bytes` bytes of the payload of a slot, which FreeSlot has
  // returned.
  void Send(Slot* slot, size_t bytes) { Dispatch(slot, bytes, 0); }
  Result<bool> Flush();
  bool AllSent() const { return unsent_.empty() && sends_under_way_ == 0; }
  bool Close();  // Link::Close

  // The first message that has bytes to read, or null.
  const Slot* Front() const { return accepted_.empty() ? nullptr : accepted_.front(); }
  void Pop();

  // Lets libfabric work. Returns whether an operation of any link has ended.
  bool Turn();
  Status WriteState() const;
  Status ReadState();  // A reader that has found nothing calls it.
  // Looks whether the peer is still there, if the last look was long ago.
  void LookAtLifeline();
  // Implements Waitable::Arm for a caller that has found nothing to do.
  bool Arm(std::vector<pollfd>* fds);
  bool connected() const { return connected_; }

 private:
  // -- the introduction
  void Connect();
  void Greet();
  bool ReadGreeting();

  // -- sending
  void ChooseClass(size_t bytes);
  void Dispatch(Slot* slot, size_t bytes, uint32_t flags);
  void Seal(Slot* slot);
  void SendWaiting();
  void SendNote();

  // -- receiving
  void Completed(FabricEndpoint::Operation* operation, const Status& status) override;
  Slot* NextArrived();
  Status CheckMessage(const Slot& slot) const;
  bool Unseal(Slot* slot);
  void Accept(Slot* slot);
  void AddCredits(const FabricHeader& header);
  void Recycle(Slot* slot);
  void PostWaiting();
  void OpenLarge(SlotRing* ring, bool sends);

  // Ends the link for writers, but lets arrive what is still on its way.
  void Lose(const Status& why);
  void Break(const Status& why);

  const std::shared_ptr<FabricEndpoint> endpoint_;
  Descriptor lifeline_;
  std::shared_ptr<SlotBuffers> buffers_ = std::make_shared<SlotBuffers>();
  std::unique_ptr<Cipher> encrypt_, decrypt_;

  FabricGreeting greeting_;  // the peer's
  size_t greeting_bytes_ = 0;
  bool greeted_ = false, connected_ = false, hello_ = false;
  uint64_t tag_ = 0;   // messages to this end have it
  uint64_t peer_ = 0;  // libfabric's number of the address

  uint32_t sent_order_ = 0, accepted_order_ = 0;
  std::array<uint32_t, 2> credits_ = {kSmallSlotCount, 0};  // free slots of the peer
  std::array<uint32_t, 2> owed_ = {};  // own slots to return to the peer
  std::deque<Slot*> unsent_;           // sealed, but the provider was busy
  std::deque<Slot*> unposted_;         // receives, in their order
  int sends_under_way_ = 0;
  SlotClass wanted_ = kSmallSlots;  // the class that FreeSlot has looked for
  bool wants_large_ = false;

  std::deque<Slot*> accepted_;  // messages with bytes to read

  uint64_t looks_ = 0;      // counts the calls of LookAtLifeline
  bool look_now_ = false;   // This rank has slept, so the lifeline may have changed.
  bool closing_ = false;    // This end says bye as soon as it can.
  bool said_bye_ = false;   // This end sends no other message any more.
  bool bye_ = false;        // The peer has said bye.
  bool cancelled_ = false;  // Operations may fail now.
  std::chrono::steady_clock::time_point last_arrival_;  // set only after a loss
  Status lost_;    // writing fails, and reading if nothing arrives any more
  Status broken_;  // both directions fail
};

}  // namespace ringjax
