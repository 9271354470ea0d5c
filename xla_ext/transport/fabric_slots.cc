// See fabric_slots.h.
#include "transport/fabric_slots.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>

namespace ringjax {

Result<std::unique_ptr<SlotMemory>> SlotMemory::Map(FabricEndpoint* endpoint,
                                                    size_t bytes) {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  bytes = (bytes + page - 1) / page * page;
  void* mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  if (mapped == MAP_FAILED)
    return Status(Code::kFailedPrecondition,
                  "cannot map the " + std::to_string(bytes) +
                      " bytes of a link: " + std::strerror(errno));
  std::unique_ptr<SlotMemory> made(
      new SlotMemory(static_cast<std::byte*>(mapped), bytes));
  madvise(mapped, bytes, MADV_DONTFORK);
  const Result<ofi::Mr*> registered = endpoint->Register(mapped, bytes);
  if (!registered.ok()) return registered.status();
  made->registered_ = registered.value();
  return made;
}

SlotMemory::~SlotMemory() {
  FabricEndpoint::Unregister(registered_);
  munmap(memory_, bytes_);
}

std::byte* SlotMemory::Take(size_t bytes) {
  std::byte* const at = memory_ + taken_;
  taken_ += bytes;
  RJ_CHECK(taken_ <= bytes_, "slots are larger than their memory");
  return at;
}

void SlotRing::Open(SlotMemory* memory, FabricEndpoint::Owner* owner, SlotClass kind,
                    bool sends, size_t count, size_t bytes) {
  slots_ = std::vector<Slot>(count);  // never grows: operations have its addresses
  bytes_ = bytes;
  registered_ = memory->registered();
  for (Slot& slot : slots_) {
    slot.owner = owner;
    slot.kind = kind;
    slot.sends = sends;
    slot.memory = memory->Take(bytes);
  }
}

bool SlotBuffers::UnderWay() {
  bool any = false;
  ForEach([&any](const Slot& slot) { any |= slot.under_way; });
  return any;
}

}  // namespace ringjax
