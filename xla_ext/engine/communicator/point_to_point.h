// PointToPoint: messages between pairs of ranks of a communicator.
//
// In contrast to a collective call, only the ranks that send or receive take part, and
// ranks do not agree first: the caller guarantees that each message that one rank sends
// is received by its peer, with the same size, in the same order. A communicator whose
// ranks send messages to each other must serve no collectives, because its calls are
// not numbered alike on all ranks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "base/status.h"
#include "engine/communicator/communicator.h"

namespace ringjax {

class PointToPoint {
 public:
  struct Message {
    int peer = -1;  // rank of the communicator
    void* data = nullptr;
    uint64_t bytes = 0;
  };

  // `communicator` must outlive the object.
  explicit PointToPoint(Communicator* communicator) : communicator_(*communicator) {}

  // Sends and receives all messages, and returns when all data are in place. No message
  // waits for another one, except for an earlier message of the same pair. `name` is
  // JAX's name of the operation, see Call::jax_op. Fails as Communicator::Run does; an
  // error that concerns a lost peer has that peer's rank.
  Status Exchange(std::span<const Message> sends, std::span<const Message> receives,
                  std::string_view name);

 private:
  Status Move(const Call& call, std::span<const Message> sends,
              std::span<const Message> receives);

  Communicator& communicator_;
};

}  // namespace ringjax
