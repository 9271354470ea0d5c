// ControlMessage: the messages of a heartbeat, as they go over the wire.
//
// Every message has the same head, and `length` bytes of text follow it. Some types
// have a text of their own format, which begins with one of the structures below.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace ringjax {

struct ControlMessage {
  enum class Type : uint8_t {
    kBeat = 1,
    kFail,
    kLeave,
    kAsk,
    kAnswer,
    kTeardown,
    kWaits,
    kClock
  };
  static constexpr size_t kMostText = 1024;  // bytes of a text

  uint32_t magic = 0x42484752;
  Type type = Type::kBeat;
  uint8_t pad[3] = {};
  int32_t culprit = -1;
  uint32_t length = 0;
  // Entered calls of the sender: on the world, on its control communicator.
  std::array<uint64_t, 2> entered = {};

  struct Finished {  // the text of kLeave is a list of them, one per communicator
    int32_t communicator = 0;
    uint32_t pad = 0;
    uint64_t calls = 0;
  };
  struct AskHead {  // begins the text of kAsk; the title of the stalled call follows
    uint64_t sequence = 0;
    int32_t communicator = 0;
    uint32_t token = 0;  // chosen by the sender, returned with the reply
    uint32_t operation = 0, pad = 0;
  };
  struct AnswerHead {  // begins the text of kAnswer; the reply in words follows
    uint32_t token = 0, entered = 0;
  };
  struct Gone {  // the text of kTeardown
    int32_t communicator = 0;
    uint32_t epoch = 0;
  };
  struct WaitsHead {  // begins the text of kWaits; `count` waits and a place follow
    uint32_t count = 0, pad = 0;
    uint64_t calls = 0;
    double wait = 0, move = 0;
  };
  struct ClockText {  // the text of kClock, in seconds; a request has only `asked`
    double asked = 0, came = 0, answered = 0;
  };
};

// Returns the bytes of a structure, followed by `text`.
template <typename Head>
std::string WithHead(const Head& head, std::string_view text) {
  std::string bytes(reinterpret_cast<const char*>(&head), sizeof head);
  return bytes.append(text);
}

}  // namespace ringjax
