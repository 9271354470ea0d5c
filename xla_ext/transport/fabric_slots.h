// The memory of a link over a fabric: slots, each of which holds one message.
//
// Slots are registered with the provider once. Memory of the caller never is, so that
// nothing depends on when XLA or Python unmap theirs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/status.h"
#include "transport/fabric_endpoint.h"

namespace ringjax {

// The classes of slots. A link begins with a few small slots, because pinned memory is
// scarce and most pairs of a large job exchange short messages only. It gets large
// slots when it first carries a long message. Notes return slots to the sender.
enum SlotClass : int { kSmallSlots, kLargeSlots, kNotes, kSlotClasses };

inline constexpr size_t kSmallSlotBytes = 8 << 10, kSmallSlotCount = 4;
// A sender has at most four notes under way (FabricMessages::SendNote), and its bye.
inline constexpr size_t kNoteBytes = 64, kNoteCount = 5;

// The beginning of each message, in the byte order of the host, as in all links.
struct FabricHeader {
  uint32_t number;       // counts the messages of a class and direction
  uint32_t order;        // counts all messages of a direction
  uint32_t bytes;        // payload behind the header
  uint32_t flags;        // kHello ...
  uint32_t returned[2];  // small and large slots that the receiver may use again
  uint64_t unused;       // 0
};
static_assert(sizeof(FabricHeader) == 32);

struct Slot : FabricEndpoint::Operation {
  SlotClass kind = kSmallSlots;
  bool sends = false;
  bool arrived = false;  // received, and not yet accepted
  std::byte* memory = nullptr;
  size_t filled = 0;         // bytes of the message, header included
  FabricHeader header = {};  // a copy, which the peer cannot change any more

  std::byte* payload() const { return memory + sizeof(FabricHeader); }
};

// Memory that the provider may read and write. Children of this process do not inherit
// it: otherwise a fork would make the kernel copy pages that a card writes to.
class SlotMemory {
 public:
  static Result<std::unique_ptr<SlotMemory>> Map(FabricEndpoint* endpoint,
                                                 size_t bytes);
  ~SlotMemory();
  SlotMemory(const SlotMemory&) = delete;
  SlotMemory& operator=(const SlotMemory&) = delete;

  ofi::Mr* registered() const { return registered_; }
  // Returns the next `bytes` bytes.
  std::byte* Take(size_t bytes);

 private:
  SlotMemory(std::byte* memory, size_t bytes) : memory_(memory), bytes_(bytes) {}

  std::byte* memory_;
  size_t bytes_, taken_ = 0;
  ofi::Mr* registered_ = nullptr;
};

// Slots of one class and direction, which are used in turn.
class SlotRing {
 public:
  void Open(SlotMemory* memory, FabricEndpoint::Owner* owner, SlotClass kind,
            bool sends, size_t count, size_t bytes);
  bool open() const { return !slots_.empty(); }
  size_t size() const { return slots_.size(); }
  size_t bytes() const { return bytes_; }
  ofi::Mr* registered() const { return registered_; }
  std::vector<Slot>& slots() { return slots_; }
  Slot& front() { return slots_[used_ % slots_.size()]; }
  // The number of the message in the front slot.
  uint32_t number() const { return static_cast<uint32_t>(used_); }
  void Next() { ++used_; }

 private:
  std::vector<Slot> slots_;
  size_t bytes_ = 0;
  ofi::Mr* registered_ = nullptr;
  uint64_t used_ = 0;
};

// All that the provider may use as long as an operation of a link is under way. A link
// that cannot cancel its operations leaves this object to its endpoint.
struct SlotBuffers {
  std::vector<std::unique_ptr<SlotMemory>> memory;
  SlotRing out[kSlotClasses], in[kSlotClasses];

  // Calls `visit(slot)` for each slot.
  template <typename Visit>
  void ForEach(const Visit& visit) {
    for (auto* rings : {&out, &in})
      for (SlotRing& ring : *rings)
        for (Slot& slot : ring.slots()) visit(slot);
  }
  bool UnderWay();
};

}  // namespace ringjax
