// ControlMessage: the messages of a heartbeat, as they are sent.
//
// Every message has this structure as its head, and `length` bytes of text follow. For
// some types, the text begins with one of the structures below. A message with a
// destination is passed on from rank to rank until it arrives (ControlConnections). All
// other messages are for the rank at the other end of the connection.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace ringjax {

struct ControlMessage {
  enum class Type : uint8_t {
    kBeat = 1,  // the sender is alive
    kFail,      // the sender, or `culprit`, has failed; the text is the reason
    kLeave,     // the sender shuts down cleanly
    kProbe,     // a straggler probe
    kReply,     // the reply to a straggler probe
    kTeardown,  // the sender is ready to tear down a communicator
    kWaits,     // how long calls of the sender have waited
    kClock,     // a request for the receiver's clock, or the reply
    kEnded,     // the process of `culprit` has ended
    kEpoch      // the sender continues in another epoch (links/control_connection.py)
  };
  static constexpr size_t kMaxText = 1024;  // bytes of a text
  static constexpr size_t kEpochText = 40;  // bytes of the text of kEpoch

  uint32_t magic = 0x43484752;
  Type type = Type::kBeat;
  uint8_t pad[3] = {};
  int32_t from = -1;  // the rank that has made the message
  int32_t to = -1;    // destination; -1: the rank at the other end
  int32_t culprit = -1;
  uint32_t length = 0;
  // Calls that the sender has entered on the world, and on its control communicator.
  std::array<uint64_t, 2> entered = {};

  struct Finished {  // the text of kLeave is a list of these, one per communicator
    int32_t communicator = 0;
    uint32_t pad = 0;
    uint64_t calls = 0;
  };
  struct ProbeHead {  // begins the text of kProbe; the call's description follows
    uint64_t sequence = 0;
    int32_t communicator = 0;
    uint32_t token = 0;  // chosen by the sender; the reply has the same token
    uint32_t operation = 0, pad = 0;
  };
  struct ReplyHead {  // begins the text of kReply; the reply in words follows
    uint32_t token = 0, entered = 0;
    int32_t waits_for = -1;  // if `entered`: the rank that the call waits for
    uint32_t pad = 0;
  };
  struct Teardown {  // the text of kTeardown
    int32_t communicator = 0;
    uint32_t epoch = 0;
  };
  struct WaitsHead {  // begins the text of kWaits; `count` waits and a location follow
    uint32_t count = 0, pad = 0;
    uint64_t calls = 0;
    double wait = 0, move = 0;
  };
  struct ClockText {  // the text of kClock, in seconds; a request has only `requested`
    double requested = 0, received = 0, replied = 0;
  };
};

// Returns the bytes of a structure, followed by `text`.
template <typename Head>
std::string WithHead(const Head& head, std::string_view text) {
  std::string bytes(reinterpret_cast<const char*>(&head), sizeof head);
  return bytes.append(text);
}

}  // namespace ringjax
