// A link over a fabric: a byte stream over the messages of fabric_messages.h.
#pragma once

#include <array>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "transport/fabric_messages.h"
#include "transport/link.h"

namespace ringjax {

class FabricLink final : public Link {
 public:
  FabricLink(std::shared_ptr<FabricEndpoint> endpoint, Descriptor lifeline)
      : messages_(std::move(endpoint), std::move(lifeline)) {}

  FabricMessages& messages() { return messages_; }

  std::string_view transport() const override { return messages_.endpoint().name(); }
  Result<size_t> TryWrite(std::span<const iovec> pieces) override;
  Result<size_t> TryRead(std::span<const iovec> pieces) override;
  Result<std::span<std::byte>> Reserve(size_t limit, size_t granularity) override;
  Status Commit(size_t bytes) override;
  Result<std::span<const std::byte>> Peek(size_t limit, size_t granularity) override;
  void Consume(size_t bytes) override { Drop(bytes); }
  Result<bool> Flush() override { return messages_.Flush(); }
  bool Close() override { return messages_.Close(); }
  bool Arm(bool want_read, bool want_write, std::vector<pollfd>* fds) override;
  void Disarm() override {}

 private:
  // Return the next bytes: of the carry or the front message, or of the message only.
  std::span<const std::byte> Front();
  std::span<const std::byte> MessageFront();
  void Drop(size_t bytes);
  void DropFromMessage(size_t bytes);
  bool FillCarry(size_t granularity);
  bool HasBytes() const {
    return messages_.Front() != nullptr || carry_end_ - carry_begin_ > scant_bytes_;
  }
  // Returns a slot for a writer, or null; then the status says whether for ever.
  Slot* SlotToWrite(size_t bytes, Status* status);

  FabricMessages messages_;
  Slot* reserved_ = nullptr;
  bool blocked_ = false;  // the last attempt to write found no slot
  size_t read_ = 0;       // bytes of the front message
  // An element that two messages share is put together here.
  alignas(16) std::array<std::byte, 32> carry_;
  size_t carry_begin_ = 0, carry_end_ = 0;
  size_t scant_bytes_ = 0;  // bytes of an incomplete element that the last Peek found
};

}  // namespace ringjax
